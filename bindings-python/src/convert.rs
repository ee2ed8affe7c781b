//! Token ids from Python.

use pyo3::buffer::{Element, PyBuffer};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyByteArray, PyBytes};

use crate::error::invalid;

/// Token ids, copied out of a buffer or a sequence.
///
/// The copy (16 KB for 4,096 tokens) is what allows the hashing to run while another thread changes the buffer.
pub(crate) struct Tokens(pub(crate) Vec<u32>);

impl FromPyObject<'_, '_> for Tokens {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, '_, PyAny>) -> PyResult<Self> {
        let object = &*object;
        if let Ok(buffer) = PyBuffer::<u32>::get(object) {
            return copy(object.py(), &buffer).map(Self);
        }
        if let Ok(buffer) = PyBuffer::<i32>::get(object) {
            return narrow(&copy(object.py(), &buffer)?).map(Self);
        }
        if let Ok(buffer) = PyBuffer::<i64>::get(object) {
            return narrow(&copy(object.py(), &buffer)?).map(Self);
        }
        let is_bytes = object.is_instance_of::<PyBytes>() || object.is_instance_of::<PyByteArray>();
        match object.extract::<Vec<i64>>() {
            Ok(tokens) if !is_bytes => narrow(&tokens).map(Self),
            _ => Err(PyTypeError::new_err(format!(
                "tokens must be a u32, i32 or i64 buffer or a sequence of integers, not {}",
                object.get_type().name()?
            ))),
        }
    }
}

/// Copies a one-dimensional contiguous buffer.
fn copy<T: Element>(py: Python<'_>, buffer: &PyBuffer<T>) -> PyResult<Vec<T>> {
    if buffer.dimensions() != 1 || !buffer.is_c_contiguous() {
        return Err(invalid(format!(
            "tokens must be one contiguous row, not a buffer of {} dimensions{}",
            buffer.dimensions(),
            if buffer.is_c_contiguous() {
                ""
            } else {
                " with strides"
            }
        )));
    }
    buffer.to_vec(py)
}

fn narrow<T: Copy + Into<i64>>(tokens: &[T]) -> PyResult<Vec<u32>> {
    tokens
        .iter()
        .enumerate()
        .map(|(position, &token)| {
            let token: i64 = token.into();
            u32::try_from(token).map_err(|_| {
                invalid(format!(
                    "tokens[{position}] is {token}: 0 to {} are accepted",
                    u32::MAX
                ))
            })
        })
        .collect()
}
