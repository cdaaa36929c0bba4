"""`python -m linattn_cli` is `linattn`."""

from linattn_cli.app import main

if __name__ == "__main__":
    main()
