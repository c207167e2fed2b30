"""`python -m millstream`: the command line, where `millstream` is not on the PATH."""

from millstream.cli.main import app

if __name__ == "__main__":
    app(prog_name="python -m millstream")
