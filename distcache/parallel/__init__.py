"""The four layouts behind one interface: `data`, `hybrid`, `resident`, `host`."""
