"""One module per resource: parse, call, render; no decisions."""
