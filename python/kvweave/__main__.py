"""`python -m kvweave`: the command line, where its script is not on the path."""

from kvweave.cli import main

if __name__ == "__main__":
    main()
