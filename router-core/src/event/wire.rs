//! Engine encodings to [`EventBatch`].
