//! kvlane sidecar.
