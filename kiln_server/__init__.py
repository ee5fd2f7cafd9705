"""The HTTP server of Kiln: Starlette routes over an engine, served by Hypercorn."""
