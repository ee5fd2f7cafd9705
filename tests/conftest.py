"""Property tests are the same everywhere: no deadline, no database, one seed."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("kiln", deadline=None, derandomize=True, database=None)
settings.load_profile("kiln")
