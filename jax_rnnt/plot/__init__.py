"""Pictures of lattices, emissions and confidences, with matplotlib.

Every `draw_...` draws on Axes, returns them and shows nothing. The pictures work in grey: dark is probable, and marks
and line styles tell things apart, not colours alone. Long utterances have thinner lines, and names only where there is
room; a space appears as ␣.
"""

from jax_rnnt.plot._pictures import FAINT as FAINT
from jax_rnnt.plot._pictures import arc_posteriors as arc_posteriors
from jax_rnnt.plot._pictures import draw_beam as draw_beam
from jax_rnnt.plot._pictures import draw_emissions as draw_emissions
from jax_rnnt.plot._pictures import draw_latencies as draw_latencies
from jax_rnnt.plot._pictures import draw_lattice as draw_lattice
from jax_rnnt.plot._reliability import draw_reliability as draw_reliability

__all__ = ["arc_posteriors", "draw_beam", "draw_emissions", "draw_latencies", "draw_lattice", "draw_reliability"]
