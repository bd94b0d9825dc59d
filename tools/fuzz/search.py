"""The loop of both fuzzers: Hypothesis draws examples for a while, and makes the first that fails smaller."""

import argparse
import time
import traceback

import hypothesis


class OutOfTime(KeyboardInterrupt):
    """Hypothesis lets it pass: no example has failed."""


def options(description, arguments):
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--examples", type=int, default=10**6, help="stop after so many")
    return parser.parse_args(arguments)


def search(examples, check, options):
    """0, or 1 after a failure of `check`, which is printed with its example; the same seed repeats it."""
    deadline, failed, status = time.monotonic() + options.seconds, False, 0

    @hypothesis.seed(options.seed)
    @hypothesis.settings(
        max_examples=options.examples,
        deadline=None,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(examples)
    def run(example):
        nonlocal failed
        if not failed and time.monotonic() > deadline:
            raise OutOfTime
        try:
            check(example)
        except Exception:
            failed = True
            raise

    try:
        run()
    except OutOfTime:
        pass
    except Exception:
        print(traceback.format_exc(chain=False, limit=-4))
        status = 1
    return status
