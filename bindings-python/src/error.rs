//! Core errors as Python exceptions: one base class, and the built-in classes that callers expect beside it.

use kvlane::{Error, ErrorKind};
use pyo3::PyTypeInfo;
use pyo3::exceptions::{PyException, PyKeyError, PyValueError};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyTuple, PyType};

/// Makes the exception of a core error.
#[expect(clippy::needless_pass_by_value, reason = "it is handed to map_err")]
pub(crate) fn to_py(error: Error) -> PyErr {
    Python::attach(|py| {
        let class = match class_of(py, error.kind()) {
            Ok(class) => class,
            Err(failure) => return failure,
        };
        PyErr::from_type(class, (error.to_string(),))
    })
}

/// Makes the exception of a malformed argument.
pub(crate) fn invalid(message: String) -> PyErr {
    to_py(Error::new(ErrorKind::InvalidRequest, message))
}

/// Makes the exception of an unusable configuration.
pub(crate) fn config_error(message: String) -> PyErr {
    to_py(Error::new(ErrorKind::Config, message))
}

/// Adds the exception classes to the module.
pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let py = module.py();
    module.add("Error", base(py)?)?;
    for kind in ErrorKind::ALL {
        let class = class_of(py, kind)?;
        module.add(class.name()?.to_str()?, class)?;
    }
    Ok(())
}

/// The base class of all.
fn base(py: Python<'_>) -> PyResult<Bound<'_, PyType>> {
    static BASE: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    let class = BASE.get_or_try_init(py, || {
        let bases = PyTuple::new(py, [PyException::type_object(py)])?;
        new_class(py, "Error", &bases, "error")
    })?;
    Ok(class.bind(py).clone())
}

/// The class of a kind.
fn class_of(py: Python<'_>, kind: ErrorKind) -> PyResult<Bound<'_, PyType>> {
    static CLASSES: PyOnceLock<Vec<(ErrorKind, Py<PyType>)>> = PyOnceLock::new();
    let classes = CLASSES.get_or_try_init(py, || {
        ErrorKind::ALL
            .into_iter()
            .map(|kind| {
                let mut bases = vec![base(py)?];
                let (name, builtin) = shape(py, kind);
                bases.extend(builtin);
                let bases = PyTuple::new(py, bases)?;
                Ok((kind, new_class(py, name, &bases, kind.code())?))
            })
            .collect::<PyResult<Vec<_>>>()
    })?;
    let class = classes.iter().find(|(known, _)| *known == kind);
    class.map_or_else(|| base(py), |(_, class)| Ok(class.bind(py).clone()))
}

/// Name of a kind's class, and the built-in class it also is.
fn shape(py: Python<'_>, kind: ErrorKind) -> (&'static str, Option<Bound<'_, PyType>>) {
    match kind {
        ErrorKind::Config => ("ConfigError", Some(PyValueError::type_object(py))),
        ErrorKind::InvalidRequest => ("InvalidRequest", Some(PyValueError::type_object(py))),
        ErrorKind::UnknownWorker => ("UnknownWorker", Some(PyKeyError::type_object(py))),
        ErrorKind::Overloaded => ("Overloaded", None),
        ErrorKind::Closed => ("Closed", None),
        // A kind that this binding does not know yet; the tests walk all of them.
        _ => ("UnnamedError", None),
    }
}

/// Creates an exception class with a `code`.
fn new_class(
    py: Python<'_>,
    name: &str,
    bases: &Bound<'_, PyTuple>,
    code: &str,
) -> PyResult<Py<PyType>> {
    let namespace = PyDict::new(py);
    namespace.set_item("__module__", "kvlane")?;
    namespace.set_item("code", code)?;
    if code == ErrorKind::Overloaded.code() {
        namespace.set_item("retry_after", py.None())?;
    }
    // KeyError would print the message's repr.
    let str_method = PyException::type_object(py).getattr("__str__")?;
    namespace.set_item("__str__", str_method)?;
    let class = PyType::type_object(py).call1((name, bases, namespace))?;
    Ok(class.cast_into::<PyType>()?.unbind())
}
