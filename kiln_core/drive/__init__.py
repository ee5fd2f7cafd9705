"""The edge of the core: sockets, files, clocks. Only this package performs IO."""
