//! Values from Python.

use std::time::Duration;

use kvlane::MediaSpan;
use pyo3::buffer::{Element, PyBuffer, PyUntypedBuffer};
use pyo3::exceptions::PyException;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyString};

use crate::ending::Call;
use crate::error::invalid;

/// Token ids, copied out of a buffer or a sequence and not yet checked.
///
/// The copy (16 KB for 4,096 tokens) is what allows the hashing to run while another thread changes the buffer.
pub(crate) enum Tokens {
    U32(Vec<u32>),
    I32(Vec<i32>),
    I64(Vec<i64>),
}

impl FromPyObject<'_, '_> for Tokens {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, '_, PyAny>) -> PyResult<Self> {
        let object = &*object;
        // Conversions of the caller's own kinds run Python code.
        let _call = Call::enter();
        if let Ok(buffer) = PyUntypedBuffer::get(object) {
            return from_buffer(object.py(), &buffer);
        }
        // Tensors on the CPU: a view as an array, no copy.
        if let Some(view) = object.getattr_opt("__array__")? {
            let array = view
                .call0()
                .map_err(|error| unusable(object, &format!("its __array__ failed: {error}")))?;
            let buffer = PyUntypedBuffer::get(&array)
                .map_err(|error| unusable(object, &error.to_string()))?;
            return from_buffer(object.py(), &buffer);
        }
        if object.is_instance_of::<PyString>() {
            return Err(unusable(object, "a prompt as text is given by text="));
        }
        object
            .extract::<Vec<i64>>()
            .map(Self::I64)
            .map_err(|error| blame(object, &error))
    }
}

impl Tokens {
    pub(crate) const fn len(&self) -> usize {
        match self {
            Self::U32(tokens) => tokens.len(),
            Self::I32(tokens) => tokens.len(),
            Self::I64(tokens) => tokens.len(),
        }
    }

    /// Checks signed ids; needs no interpreter.
    pub(crate) fn into_checked(self) -> kvlane::Result<Vec<u32>> {
        match self {
            Self::U32(tokens) => Ok(tokens),
            Self::I32(tokens) => narrow(&tokens),
            Self::I64(tokens) => narrow(&tokens),
        }
    }
}

fn from_buffer(py: Python<'_>, buffer: &PyUntypedBuffer) -> PyResult<Tokens> {
    let refused = || {
        invalid(format!(
            "tokens are a buffer of format {:?}: u32, i32 and i64 in this machine's byte order are accepted",
            buffer.format().to_string_lossy()
        ))
    };
    // PyO3 takes `>` for this machine's order everywhere.
    let order = buffer.format().to_bytes().first();
    if cfg!(target_endian = "little") && matches!(order, Some(b'>' | b'!')) {
        return Err(refused());
    }
    if let Ok(buffer) = buffer.as_typed::<u32>() {
        return copy(py, buffer).map(Tokens::U32);
    }
    if let Ok(buffer) = buffer.as_typed::<i64>() {
        return copy(py, buffer).map(Tokens::I64);
    }
    if let Ok(buffer) = buffer.as_typed::<i32>() {
        return copy(py, buffer).map(Tokens::I32);
    }
    Err(refused())
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

/// Looks for one that is out of range first: a plain search and a plain cast are both vectorised.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "all are in range by then"
)]
fn narrow<T: Copy + Into<i64>>(tokens: &[T]) -> kvlane::Result<Vec<u32>> {
    let odd = |token: T| !(0..=i64::from(u32::MAX)).contains(&token.into());
    if tokens.iter().fold(false, |any, &token| any | odd(token)) {
        let position = tokens.iter().position(|&token| odd(token)).unwrap_or(0);
        let token: i64 = tokens[position].into();
        return Err(out_of_range(position, &token.to_string()));
    }
    Ok(tokens.iter().map(|&token| token.into() as u32).collect())
}

fn out_of_range(position: usize, token: &str) -> kvlane::Error {
    let message = format!(
        "tokens[{position}] is {token}: 0 to {} are accepted",
        u32::MAX
    );
    kvlane::Error::new(kvlane::ErrorKind::InvalidRequest, message)
}

/// Finds out why a sequence is none of integers.
fn blame(object: &Bound<'_, PyAny>, error: &PyErr) -> PyErr {
    let Ok(items) = object.try_iter() else {
        return unusable(object, &error.to_string());
    };
    for (position, item) in items.flatten().enumerate() {
        if item.extract::<i64>().is_err() {
            let shown = item.repr().map_or_else(
                |_| "not an integer".to_owned(),
                |repr| repr.to_string_lossy().chars().take(40).collect(),
            );
            return crate::error::to_py(out_of_range(position, &shown));
        }
    }
    unusable(object, &error.to_string())
}

fn unusable(object: &Bound<'_, PyAny>, why: &str) -> PyErr {
    let kind = object
        .get_type()
        .name()
        .map_or_else(|_| "that".to_owned(), |name| name.to_string());
    invalid(format!(
        "tokens must be a u32, i32 or i64 buffer or a sequence of integers, not {kind}: {why}"
    ))
}

/// A whole number from 0 to 2³² − 1.
pub(crate) struct U32(pub(crate) u32);

impl FromPyObject<'_, '_> for U32 {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, '_, PyAny>) -> PyResult<Self> {
        whole(&object, u64::from(u32::MAX))
            .map(|number| Self(u32::try_from(number).unwrap_or(u32::MAX)))
    }
}

/// Extracts a whole number whose default is to be seen in the signature.
pub(crate) fn u32_of(object: &Bound<'_, PyAny>) -> PyResult<u32> {
    object.extract::<U32>().map(|number| number.0)
}

/// A whole number from 0 to 2⁶⁴ − 1.
pub(crate) struct U64(pub(crate) u64);

impl FromPyObject<'_, '_> for U64 {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, '_, PyAny>) -> PyResult<Self> {
        whole(&object, u64::MAX).map(Self)
    }
}

impl U64 {
    pub(crate) fn as_usize(&self) -> usize {
        usize::try_from(self.0).unwrap_or(usize::MAX)
    }
}

/// Reads a whole number; one out of range is an invalid request, where Python would raise `OverflowError`.
fn whole(object: &Bound<'_, PyAny>, max: u64) -> PyResult<u64> {
    match object.extract::<u64>() {
        Ok(number) if number <= max => Ok(number),
        Err(error) if error.is_instance_of::<pyo3::exceptions::PyTypeError>(object.py()) => {
            Err(error)
        }
        _ => Err(invalid(format!(
            "{} is out of range: 0 to {max} are accepted",
            object.str()?.to_string_lossy()
        ))),
    }
}

/// Reads a span of time.
pub(crate) fn seconds(name: &str, seconds: f64) -> PyResult<Duration> {
    Duration::try_from_secs_f64(seconds).map_err(|_| {
        invalid(format!(
            "{name} of {seconds} seconds is out of range: 0 and more are accepted"
        ))
    })
}

/// Media items: `(offset_tokens, length_tokens, digest)`.
#[derive(Default)]
pub(crate) struct Media(pub(crate) Vec<MediaSpan>);

impl FromPyObject<'_, '_> for Media {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, '_, PyAny>) -> PyResult<Self> {
        let items: Vec<(U64, U64, Vec<u8>)> = object.extract().map_err(|error| {
            invalid(format!(
                "media must be a list of (offset, length, digest) with a digest of bytes: {error}"
            ))
        })?;
        let spans = items.into_iter().map(|(offset, length, digest)| MediaSpan {
            offset_tokens: offset.as_usize(),
            length_tokens: length.as_usize(),
            digest,
        });
        Ok(Self(spans.collect()))
    }
}

/// Copies a payload, so that it can be decoded while another thread changes its buffer.
pub(crate) fn payload(object: &Bound<'_, PyAny>) -> PyResult<Vec<u8>> {
    let py = object.py();
    PyBuffer::<u8>::get(object)
        .and_then(|buffer| buffer.to_vec(py))
        .map_err(|error| {
            invalid(format!(
                "payload must be bytes as received from the engine: {error}"
            ))
        })
}

/// Reads text; a lone surrogate is refused.
pub(crate) fn text<'a>(name: &str, text: &'a Bound<'_, PyString>) -> PyResult<&'a str> {
    text.to_str()
        .map_err(|error| invalid(format!("{name} is not valid Unicode: {error}")))
}

/// Writes an object as compact JSON; what fails is named `name`.
pub(crate) fn to_json(
    object: &Bound<'_, PyAny>,
    name: &str,
    refuse: impl Fn(String) -> PyErr,
) -> PyResult<String> {
    static ENCODE: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    let py = object.py();
    let encode = ENCODE.get_or_try_init(py, || {
        let options = PyDict::new(py);
        options.set_item("ensure_ascii", false)?;
        options.set_item("allow_nan", false)?;
        options.set_item("separators", (",", ":"))?;
        let encoder = py.import("json")?.getattr("JSONEncoder")?;
        let encode = encoder.call((), Some(&options))?.getattr("encode")?;
        PyResult::Ok(encode.unbind())
    })?;
    let written = encode.bind(py).call1((object,)).and_then(|json| {
        let json = json.cast_into::<PyString>()?;
        Ok(json.to_str()?.to_owned())
    });
    written.map_err(|error| {
        if error.is_instance_of::<PyException>(py) {
            refuse(format!("{name} cannot be written as JSON: {error}"))
        } else {
            error
        }
    })
}

/// Reads JSON into Python objects.
pub(crate) fn from_json<'py>(py: Python<'py>, json: &str) -> PyResult<Bound<'py, PyAny>> {
    py.import("json")?.getattr("loads")?.call1((json,))
}
