"""`python -m hyimg_cli` is `hyimg`."""

from hyimg_cli.cli.app import main

if __name__ == "__main__":
    main()
