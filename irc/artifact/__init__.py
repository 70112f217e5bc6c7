"""The artifact folder: manifest, bundle, report, and how files are written atomically."""
