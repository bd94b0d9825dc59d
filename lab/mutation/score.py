"""Faults in the Python sources, by cosmic-ray: how many do the quick tests find?

    lab/run.sh mutation --count 40 --seed 1

Works on a copy of the checkout in build/mutated, with the kernels of the installed package. cosmic-ray lists all
faults of its operators, which would take weeks, and has no draw of its own: `count` of them are drawn here.
"""

import argparse
import pathlib
import random
import shutil
import sqlite3
import subprocess
import sys
import sysconfig

ROOT = pathlib.Path(__file__).parents[2]
FOLDER = ROOT / "build/mutated"
# First what reaches most lines in the least time.
TESTS = "tests/losses tests/layouts tests/transforms tests/decode tests/kernels tests/tools"
CONFIG = """[cosmic-ray]
module-path = "jax_rnnt"
timeout = 1800
excluded-modules = []
test-command = "{python} -m pytest -x -q -n 2 -m 'not slow' {tests}"
[cosmic-ray.distributor]
name = "local"
"""


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=40, help="faults to draw (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the draw (%(default)s)")
    parser.add_argument("--tests", default=TESTS, help="what pytest runs (all quick tests)")
    options = parser.parse_args()

    shutil.rmtree(FOLDER, ignore_errors=True)
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in listed.splitlines():
        (FOLDER / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, FOLDER / name)
    for kernels in pathlib.Path(sysconfig.get_path("platlib"), "jax_rnnt").glob("_c*.so"):
        shutil.copy(kernels, FOLDER / "jax_rnnt")

    def cosmic_ray(*command, program="cosmic-ray"):
        subprocess.run([pathlib.Path(sys.executable).with_name(program), *command], cwd=FOLDER, check=True)

    (FOLDER / "mutation.toml").write_text(CONFIG.format(python=sys.executable, tests=options.tests))
    cosmic_ray("baseline", "mutation.toml")  # the tests pass without a fault
    cosmic_ray("init", "mutation.toml", "session.sqlite")
    with sqlite3.connect(FOLDER / "session.sqlite") as session:
        jobs = [job for (job,) in session.execute("SELECT job_id FROM work_items ORDER BY job_id")]
        places = session.execute(
            "SELECT job_id FROM mutation_specs ORDER BY module_path, operator_name, occurrence"
        ).fetchall()
        chosen = {job for (job,) in random.Random(options.seed).sample(places, min(options.count, len(places)))}
        session.executemany("DELETE FROM mutation_specs WHERE job_id = ?", [(j,) for j in jobs if j not in chosen])
        session.executemany("DELETE FROM work_items WHERE job_id = ?", [(j,) for j in jobs if j not in chosen])
    cosmic_ray("exec", "mutation.toml", "session.sqlite")
    cosmic_ray("session.sqlite", "--show-pending", program="cr-report")


if __name__ == "__main__":
    main()
