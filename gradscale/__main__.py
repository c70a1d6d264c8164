"""`python -m gradscale`: the command line."""

from gradscale.cli import main

if __name__ == "__main__":
    main()
