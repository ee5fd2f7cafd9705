"""``python -m kiln_cli``."""

from kiln_cli.main import run

if __name__ == "__main__":
    run()
