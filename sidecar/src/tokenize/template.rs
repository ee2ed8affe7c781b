//! A chat template, compiled once and rendered as transformers renders it.

use std::fmt;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::Serde;
use minijinja::{AutoEscape, Environment, Error, ErrorKind, Value};
use serde_json::Map;

use super::error::TokenizeError;
use super::python;
use super::scan::{self, ContentFormat};

/// Tells the local time in the format of `strftime`.
pub(super) type Clock = fn(format: &str) -> Result<String, String>;

/// A compiled chat template.
pub(super) struct ChatTemplate {
    environment: Environment<'static>,
    format: ContentFormat,
    source: String,
}

const NAME: &str = "chat";

/// Steps a rendering may take, about one an instruction of the template: some thousand times what a long chat needs,
/// and less than a few seconds.
const FUEL: u64 = 50_000_000;

impl ChatTemplate {
    /// Compiles a template; the error is the reason alone.
    pub(super) fn compile(source: &str, clock: Clock) -> Result<Self, String> {
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder()
            .trim_blocks(true)
            .lstrip_blocks(true)
            .build()
            .map_err(|error| error.to_string())?;
        environment.set_syntax(syntax);
        environment.set_auto_escape_callback(|_| AutoEscape::None);
        environment.set_fuel(Some(FUEL));
        environment.set_unknown_method_callback(python::unknown_method);
        environment.add_filter("tojson", python::tojson);
        environment.add_test("sequence", python::is_sequence);
        environment.add_test("iterable", python::is_iterable);
        environment.add_test("number", python::is_number);
        environment.add_function(
            "raise_exception",
            |message: String| -> Result<Value, Error> {
                Err(Error::new(ErrorKind::InvalidOperation, message))
            },
        );
        environment.add_function("strftime_now", move |format: String| {
            clock(&format).map_err(|reason| Error::new(ErrorKind::InvalidOperation, reason))
        });
        environment
            .add_template_owned(NAME, scan::without_generation_tags(source))
            .map_err(|error| reason(&error))?;
        Ok(Self {
            environment,
            format: scan::content_format(source),
            source: source.to_owned(),
        })
    }

    /// Returns how the template wants a message's content.
    pub(super) const fn content_format(&self) -> ContentFormat {
        self.format
    }

    /// Tells whether the source holds a text.
    pub(super) fn mentions(&self, text: &str) -> bool {
        self.source.contains(text)
    }

    /// Renders the template with the given variables.
    pub(super) fn render(
        &self,
        variables: Map<String, serde_json::Value>,
    ) -> Result<String, TokenizeError> {
        let render = || {
            self.environment
                .get_template(NAME)?
                .render(Value::from(Serde(serde_json::Value::Object(variables))))
        };
        render().map_err(|error| TokenizeError::Render(reason(&error)))
    }
}

impl fmt::Debug for ChatTemplate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ChatTemplate")
            .field("format", &self.format)
            .field("source_bytes", &self.source.len())
            .finish_non_exhaustive()
    }
}

/// Formats the current local time, as Python's `datetime.now().strftime` does.
pub(super) fn local_time(format: &str) -> Result<String, String> {
    jiff::fmt::strtime::format(format, &jiff::Zoned::now())
        .map_err(|error| format!("strftime_now({format:?}): {error}"))
}

/// One line that says what failed and where.
fn reason(error: &Error) -> String {
    let detail = error
        .detail()
        .map_or_else(|| error.kind().to_string(), str::to_owned);
    match error.line() {
        Some(line) => format!("{detail} (line {line})"),
        None => detail,
    }
}
