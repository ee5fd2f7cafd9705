"""The command line of Kiln: thin commands over the core and over a server."""
