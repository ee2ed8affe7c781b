//! kvlane for Python.
