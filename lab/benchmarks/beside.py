"""Times our losses beside those of other libraries in PyTorch: the programs of benchmarks/ with more contestants.

    python lab/benchmarks/beside.py bench                  # torchaudio is installed into build/peers (large)
    python lab/benchmarks/beside.py bench --warp-transducer /path/to/libwarprnnt.so
    python lab/benchmarks/beside.py joint --librispeech

All other options are those of the program.
"""

import argparse
import functools
import importlib

import peers


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", choices=("bench", "joint"))
    parser.add_argument("--torch-python", metavar="PYTHON", help="that has torch and torchaudio: nothing is installed")
    parser.add_argument("--warp-transducer", metavar="LIBRARY", help="its shared library, built by you with OpenMP")
    args, rest = parser.parse_known_args(argv)
    start = functools.partial(peers.start, args.torch_python, warp_transducer=args.warp_transducer)
    importlib.import_module(args.program).main(rest, start)


if __name__ == "__main__":
    main()
