"""``python -m fused_mhc.cli``: the command line where the script is not installed."""

from . import main

main()
