"""``vopt``, and ``python -m vopt.optimizer``: a Ctrl-C before there is a command line ends it as one, without a traceback."""

import signal

if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until `main` listens

from vopt.optimizer.cli import main

if __name__ == "__main__":
    main()
