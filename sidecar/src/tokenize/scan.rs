//! Reading a template's source without rendering it: `{% generation %}` tags and the content format it expects.
//!
//! vLLM decides from the syntax tree whether a template wants a message's content as text or as a list of parts. The
//! rule is repeated here over the tags of the source, since minijinja keeps its tree private.
//!
//! # Source
//! vLLM 0.32 `renderers/hf.py`, `_detect_content_format`.

use std::collections::BTreeSet;
use std::ops::Range;

/// How a template wants the content of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ContentFormat {
    /// One text; the texts of several parts are joined by a newline.
    Text,
    /// A list of parts, as in the OpenAI API.
    Parts,
}

/// Replaces the tags of transformers' `generation` block, which marks training targets and prints its body unchanged.
///
/// A `with` block has the same scope: what is set inside is not seen outside.
pub(super) fn without_generation_tags(template: &str) -> String {
    let mut out = String::with_capacity(template.len());
    let mut copied = 0;
    for tag in tags(template).filter(|tag| tag.kind == TagKind::Statement) {
        let name = match tag.words(template) {
            "generation" => "with",
            "endgeneration" => "endwith",
            _ => continue,
        };
        let words = tag.words_range(template);
        out.push_str(&template[copied..words.start]);
        out.push_str(name);
        copied = words.end;
    }
    out.push_str(&template[copied..]);
    out
}

/// Finds out how the template wants a message's content.
pub(super) fn content_format(template: &str) -> ContentFormat {
    if Scan::new(template).loops_over_content() {
        ContentFormat::Parts
    } else {
        ContentFormat::Text
    }
}

/// A `{% %}` or `{{ }}` of the source; comments and raw blocks are left out.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Tag {
    kind: TagKind,
    /// Between the delimiters.
    inner: Range<usize>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TagKind {
    Statement,
    Expression,
}

impl Tag {
    /// Range of the content without whitespace control and surrounding space.
    fn words_range(&self, template: &str) -> Range<usize> {
        let inner = &template[self.inner.clone()];
        let front = inner.trim_start_matches(['-', '+']).trim_start();
        let start = self.inner.start + (inner.len() - front.len());
        let words = front.trim_end().trim_end_matches(['-', '+']).trim_end();
        start..start + words.len()
    }

    fn words<'t>(&self, template: &'t str) -> &'t str {
        &template[self.words_range(template)]
    }
}

/// Walks over the tags of a template.
fn tags(template: &str) -> impl Iterator<Item = Tag> {
    let mut at = 0;
    let mut raw = false;
    std::iter::from_fn(move || {
        loop {
            let open = at + template.get(at..)?.find('{')?;
            let rest = &template[open + 1..];
            let kind = match rest.as_bytes().first()? {
                b'%' => TagKind::Statement,
                b'{' if !raw => TagKind::Expression,
                b'#' if !raw => {
                    at = open + 2 + template[open + 2..].find("#}")? + 2;
                    continue;
                }
                _ => {
                    at = open + 1;
                    continue;
                }
            };
            let start = open + 2;
            let Some(end) = tag_end(template, start, kind) else {
                at = start;
                continue;
            };
            let tag = Tag {
                kind,
                inner: start..end,
            };
            let words = tag.words(template);
            if raw {
                raw = words != "endraw";
                at = if raw { start } else { end + 2 };
                continue;
            }
            at = end + 2;
            if kind == TagKind::Statement && words == "raw" {
                raw = true;
                continue;
            }
            return Some(tag);
        }
    })
}

/// Finds where a tag's content ends: its closing delimiter outside of texts and braces.
fn tag_end(template: &str, start: usize, kind: TagKind) -> Option<usize> {
    let close = match kind {
        TagKind::Statement => b"%}",
        TagKind::Expression => b"}}",
    };
    let bytes = template.as_bytes();
    let mut at = start;
    let mut depth = 0_usize;
    while at < bytes.len() {
        if depth == 0 && bytes[at..].starts_with(close) {
            return Some(at);
        }
        match bytes[at] {
            quote @ (b'\'' | b'"') => at = text_end(bytes, at, quote)?,
            b'{' => depth += 1,
            b'}' => depth = depth.saturating_sub(1),
            _ => {}
        }
        at += 1;
    }
    None
}

/// Returns the position of the closing quote of the text that begins at `at`.
fn text_end(bytes: &[u8], at: usize, quote: u8) -> Option<usize> {
    let mut at = at + 1;
    while at < bytes.len() {
        match bytes[at] {
            b'\\' => at += 1,
            byte if byte == quote => return Some(at),
            _ => {}
        }
        at += 1;
    }
    None
}

/// A `for` loop of the template.
struct Loop<'t> {
    target: &'t str,
    iterable: &'t str,
    /// Index of the macro that contains it.
    within: Option<usize>,
}

struct Macro<'t> {
    name: &'t str,
    parameters: Vec<&'t str>,
}

/// What the content rule needs to know of a template.
struct Scan<'t> {
    assignments: Vec<(&'t str, &'t str)>,
    loops: Vec<Loop<'t>>,
    macros: Vec<Macro<'t>>,
    /// Content of every tag, for the calls in it.
    contents: Vec<&'t str>,
}

impl<'t> Scan<'t> {
    fn new(template: &'t str) -> Self {
        let mut scan = Self {
            assignments: Vec::new(),
            loops: Vec::new(),
            macros: Vec::new(),
            contents: Vec::new(),
        };
        let mut open_macros = Vec::new();
        for tag in tags(template) {
            let words = tag.words(template);
            scan.contents.push(words);
            if tag.kind == TagKind::Expression {
                continue;
            }
            let (keyword, rest) = split_word(words);
            match keyword {
                "set" => {
                    if let Some((target, value)) = split_once_outside(rest, "=") {
                        scan.assignments.push((target.trim(), value.trim()));
                    }
                }
                "for" => {
                    if let Some((target, iterable)) = split_once_outside(rest, " in ") {
                        let iterable = ["if", "recursive"].into_iter().fold(iterable, cut_keyword);
                        scan.loops.push(Loop {
                            target: target.trim(),
                            iterable: iterable.trim(),
                            within: open_macros.last().copied(),
                        });
                    }
                }
                "macro" => {
                    open_macros.push(scan.macros.len());
                    scan.macros.push(parse_macro(rest));
                }
                "endmacro" => {
                    open_macros.pop();
                }
                _ => {}
            }
        }
        scan
    }

    /// The rule itself; `false` as well where vLLM gives up (an unpacking target over messages or content).
    fn loops_over_content(&self) -> bool {
        let Some(messages) = self.aliases_of_messages() else {
            return false;
        };
        let mut message_names = BTreeSet::new();
        for each in &self.loops {
            if matches!(access(each.iterable), Some((base, None)) if messages.contains(base)) {
                if !is_name(each.target) {
                    return false;
                }
                message_names.insert(each.target);
            }
        }
        let is_content = |expression: &str| matches!(access(expression), Some((base, Some("content"))) if message_names.contains(base));
        let bound: Vec<BTreeSet<&str>> = self
            .macros
            .iter()
            .map(|each| self.parameters_bound_to(each, &is_content))
            .collect();
        for each in &self.loops {
            let over_content = is_content(each.iterable)
                || match each.within {
                    Some(index) => bound[index].contains(each.iterable),
                    None => each.iterable == "content",
                };
            if over_content {
                return is_name(each.target);
            }
        }
        false
    }

    /// Names that stand for the messages or a part of them; `None` when one is assigned to something not a name.
    fn aliases_of_messages(&self) -> Option<BTreeSet<&'t str>> {
        let mut names = BTreeSet::from(["messages"]);
        loop {
            let mut grown = false;
            for &(target, value) in &self.assignments {
                if matches!(access(value), Some((base, None)) if names.contains(base)) {
                    if !is_name(target) {
                        return None;
                    }
                    grown |= names.insert(target);
                }
            }
            if !grown {
                return Some(names);
            }
        }
    }

    /// Parameters of a macro that some call binds to a message's content.
    fn parameters_bound_to(
        &self,
        each: &Macro<'t>,
        is_content: &impl Fn(&str) -> bool,
    ) -> BTreeSet<&'t str> {
        let mut bound = BTreeSet::new();
        for arguments in self.contents.iter().flat_map(|text| calls(text, each.name)) {
            for (index, argument) in split_outside(arguments, b',').into_iter().enumerate() {
                let (name, value) = match split_once_outside(argument, "=") {
                    Some((name, value)) => (name.trim(), value.trim()),
                    None => (
                        each.parameters.get(index).copied().unwrap_or_default(),
                        argument.trim(),
                    ),
                };
                let parameter = each.parameters.iter().find(|parameter| **parameter == name);
                if let Some(parameter) = parameter
                    && is_content(value)
                {
                    bound.insert(*parameter);
                }
            }
        }
        bound
    }
}

/// Reads `name(a, b='x')`.
fn parse_macro(text: &str) -> Macro<'_> {
    let (name, rest) = text.split_once('(').unwrap_or((text, ""));
    let parameters = rest.trim_end().strip_suffix(')').unwrap_or(rest);
    Macro {
        name: name.trim(),
        parameters: split_outside(parameters, b',')
            .into_iter()
            .map(|parameter| parameter.split('=').next().unwrap_or_default().trim())
            .collect(),
    }
}

/// Finds the arguments of every call of `name` in a tag.
fn calls<'t>(text: &'t str, name: &str) -> Vec<&'t str> {
    let mut found = Vec::new();
    let mut at = 0;
    while let Some(offset) = text[at..].find(name) {
        let start = at + offset;
        at = start + name.len().max(1);
        let before = text[..start].chars().next_back();
        if before.is_some_and(|character| is_name_character(character) || character == '.') {
            continue;
        }
        let Some(rest) = text.get(at..) else { break };
        let arguments = rest.trim_start();
        if arguments.starts_with('(')
            && let Some(end) = closing(arguments)
        {
            found.push(&arguments[1..end]);
        }
    }
    found
}

/// Reads an expression that is a variable, or one constant key of it, behind slices, filters and tests.
///
/// Anything else, such as an index, a call or an operator, is `None`.
fn access(expression: &str) -> Option<(&str, Option<&str>)> {
    let text = expression.trim();
    let length = text.find(|c| !is_name_character(c)).unwrap_or(text.len());
    let (base, mut rest) = text.split_at(length);
    if !is_name(base) {
        return None;
    }
    let mut key = None;
    let mut wrapped = false;
    loop {
        rest = rest.trim_start();
        let Some(first) = rest.chars().next() else {
            return Some((base, key));
        };
        match first {
            '.' if key.is_none() && !wrapped => {
                let (name, after) = split_word(rest[1..].trim_start());
                if after.starts_with('(') {
                    return None;
                }
                key = Some(name);
                rest = after;
            }
            '[' => {
                let end = closing(rest)?;
                let index = rest[1..end].trim();
                if split_outside(index, b':').len() > 1 {
                    wrapped = true;
                } else if key.is_none() && !wrapped {
                    key = Some(constant_text(index)?);
                } else {
                    return None;
                }
                rest = &rest[end + 1..];
            }
            '|' => {
                rest = skip_name_and_arguments(rest[1..].trim_start())?;
                wrapped = true;
            }
            _ => {
                let (word, after) = split_word(rest);
                if word != "is" || split_word(after).0 == "not" {
                    return None;
                }
                rest = skip_name_and_arguments(after)?;
                wrapped = true;
            }
        }
    }
}

/// Skips a filter's or test's name, with its arguments if there are any.
fn skip_name_and_arguments(text: &str) -> Option<&str> {
    let (name, rest) = split_word(text);
    if !is_name(name) {
        return None;
    }
    if rest.starts_with('(') {
        return Some(&rest[closing(rest)? + 1..]);
    }
    Some(rest)
}

/// Splits off a leading name; the rest has no space in front.
fn split_word(text: &str) -> (&str, &str) {
    let length = text.find(|c| !is_name_character(c)).unwrap_or(text.len());
    (&text[..length], text[length..].trim_start())
}

/// Cuts an expression before a keyword at its top level.
fn cut_keyword<'t>(text: &'t str, keyword: &str) -> &'t str {
    let spaced = format!(" {keyword}");
    let mut from = 0;
    while let Some(found) = find_outside(&text[from..], &spaced) {
        let after = text[from + found + spaced.len()..].chars().next();
        if !after.is_some_and(is_name_character) {
            return &text[..from + found];
        }
        from += found + spaced.len();
    }
    text
}

/// Splits at the first `=` (or other separator) that is not part of a comparison and not inside brackets or texts.
fn split_once_outside<'t>(text: &'t str, separator: &str) -> Option<(&'t str, &'t str)> {
    let at = find_outside(text, separator)?;
    let after = &text[at + separator.len()..];
    let before = text[..at].chars().next_back();
    let comparison =
        separator == "=" && (after.starts_with('=') || matches!(before, Some('!' | '<' | '>')));
    (!comparison).then(|| (&text[..at], after))
}

/// Splits at every separator byte outside of brackets and texts.
fn split_outside(text: &str, separator: u8) -> Vec<&str> {
    let mut parts = Vec::new();
    let mut from = 0;
    for at in outside_positions(text) {
        if text.as_bytes()[at] == separator {
            parts.push(&text[from..at]);
            from = at + 1;
        }
    }
    parts.push(&text[from..]);
    parts
}

fn find_outside(text: &str, pattern: &str) -> Option<usize> {
    outside_positions(text).find(|&at| text.as_bytes()[at..].starts_with(pattern.as_bytes()))
}

/// Positions of the bytes that lie outside of brackets and texts.
fn outside_positions(text: &str) -> impl Iterator<Item = usize> {
    let bytes = text.as_bytes();
    let mut at = 0;
    let mut depth = 0_usize;
    std::iter::from_fn(move || {
        while at < bytes.len() {
            let here = at;
            at += 1;
            match bytes[here] {
                quote @ (b'\'' | b'"') => at = text_end(bytes, here, quote)? + 1,
                b'(' | b'[' | b'{' => depth += 1,
                b')' | b']' | b'}' => depth = depth.saturating_sub(1),
                _ if depth == 0 => return Some(here),
                _ => {}
            }
        }
        None
    })
}

/// Position of the bracket that closes the one at the front.
fn closing(text: &str) -> Option<usize> {
    let bytes = text.as_bytes();
    let mut at = 0;
    let mut depth = 0_usize;
    while at < bytes.len() {
        match bytes[at] {
            quote @ (b'\'' | b'"') => at = text_end(bytes, at, quote)?,
            b'(' | b'[' | b'{' => depth += 1,
            b')' | b']' | b'}' => {
                depth = depth.checked_sub(1)?;
                if depth == 0 {
                    return Some(at);
                }
            }
            _ => {}
        }
        at += 1;
    }
    None
}

/// Content of a quoted text without escapes.
fn constant_text(text: &str) -> Option<&str> {
    let quote = text.chars().next().filter(|c| matches!(c, '\'' | '"'))?;
    let inner = text.strip_prefix(quote)?.strip_suffix(quote)?;
    (!inner.contains([quote, '\\'])).then_some(inner)
}

fn is_name(text: &str) -> bool {
    !text.is_empty()
        && text.chars().all(is_name_character)
        && !text.starts_with(|c: char| c.is_ascii_digit())
}

fn is_name_character(character: char) -> bool {
    character == '_' || character.is_alphanumeric()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn generation_tags_become_a_scope() {
        let template = "{%- generation -%}{{ a }}{% endgeneration %}{# {% generation %} #}{{ '{% generation %}' }}";
        assert_eq!(
            without_generation_tags(template),
            "{%- with -%}{{ a }}{% endwith %}{# {% generation %} #}{{ '{% generation %}' }}"
        );
    }

    #[test]
    fn raw_blocks_hold_no_tags() {
        let template =
            "{% raw %}{% generation %}{{ '{% endraw %}{% generation %}x{% endgeneration %}";
        assert_eq!(
            without_generation_tags(template),
            "{% raw %}{% generation %}{{ '{% endraw %}{% with %}x{% endwith %}"
        );
    }

    #[test]
    fn access_reads_names_keys_and_wrappers() {
        let cases = [
            ("messages", Some(("messages", None))),
            ("messages[1:]", Some(("messages", None))),
            ("messages[::-1] | list", Some(("messages", None))),
            (
                "messages | selectattr('role', 'equalto', 'user') | list",
                Some(("messages", None)),
            ),
            ("m.content", Some(("m", Some("content")))),
            ("m['content'] | default([])", Some(("m", Some("content")))),
            ("m.content is iterable", Some(("m", Some("content")))),
            ("m.content is not string", None),
            ("messages[0]", None),
            ("messages[0].content", None),
            ("m.content.items()", None),
            ("m.items()", None),
            ("messages + other", None),
            ("[]", None),
            ("'messages'", None),
        ];
        for (expression, expected) in cases {
            assert_eq!(access(expression), expected, "{expression}");
        }
    }
}
