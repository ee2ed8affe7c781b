//! kvlane for Node.
