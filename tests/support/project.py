"""Where the tests are."""

import pathlib

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[1]
