//! The lines of an event stream, as it passes.

/// Follows the lines of an event stream: counts events and sees the end marker.
#[derive(Debug, Default)]
pub(crate) struct EventLines {
    head: [u8; HEAD],
    head_len: usize,
    events: u32,
    ended: bool,
    /// Lines since the last empty one, which is what ends an event.
    is_inside_event: bool,
    /// Events of which was told.
    told: u32,
}

/// Enough for `event: message_stop` (19 bytes) and for `data: [DONE]`.
const HEAD: usize = 24;

/// Events between two reports to a booking: each takes a lock, and load is counted in blocks of some 16 tokens.
const TOLD_EVERY: u32 = 8;

impl EventLines {
    /// Looks at the next piece.
    pub(crate) fn feed(&mut self, mut piece: &[u8]) {
        while !piece.is_empty() {
            let end = memchr::memchr(b'\n', piece);
            let line = end.map_or(piece, |end| &piece[..end]);
            let take = line.len().min(HEAD - self.head_len);
            self.head[self.head_len..self.head_len + take].copy_from_slice(&line[..take]);
            self.head_len += take;
            let Some(end) = end else { return };
            self.finish_line();
            piece = &piece[end + 1..];
        }
    }

    /// Returns the number of finished `data:` lines, about one for each token.
    #[cfg(test)]
    pub(crate) const fn events(&self) -> u32 {
        self.events
    }

    /// Returns the number of events once there are some more than when it last did: a booking grows with them.
    pub(crate) fn growth(&mut self) -> Option<u32> {
        let grown = self.events >= self.told + TOLD_EVERY;
        grown.then(|| {
            self.told = self.events;
            self.events
        })
    }

    /// Tells whether the stream said that it is complete: `[DONE]`, or the last event of responses and messages.
    pub(crate) fn ended(&self) -> bool {
        // A last line need not be terminated.
        self.ended || is_end(&self.head[..self.head_len])
    }

    /// Tells whether the last event is not ended yet by an empty line.
    pub(crate) const fn is_inside_event(&self) -> bool {
        self.is_inside_event || self.head_len > 0
    }

    fn finish_line(&mut self) {
        let head = &self.head[..self.head_len];
        if head.starts_with(b"data:") {
            self.events = self.events.saturating_add(1);
        }
        self.ended |= is_end(head);
        self.is_inside_event = !matches!(head, b"" | b"\r");
        self.head_len = 0;
    }
}

fn is_end(head: &[u8]) -> bool {
    let field = |name: &[u8]| head.strip_prefix(name).map(<[u8]>::trim_ascii);
    let by_event = field(b"event:").is_some_and(|event| {
        event == b"message_stop"
            || event.starts_with(b"response.complete")
            || event.starts_with(b"response.incomple")
    });
    by_event || field(b"data:") == Some(b"[DONE]")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_ends_with_an_empty_line() {
        for (text, inside) in [
            ("", false),
            ("data: {", true),
            ("data: {}\n", true),
            ("data: {}\r\n", true),
            ("data: {}\n\n", false),
            ("data: {}\r\n\r\n", false),
            ("data: {}\n\n: keep-alive\n", true),
        ] {
            let mut lines = EventLines::default();
            lines.feed(text.as_bytes());
            assert_eq!(lines.is_inside_event(), inside, "{text:?}");
        }
    }

    #[test]
    fn end_markers_of_every_api_are_seen() {
        for (text, ended) in [
            ("data: [DONE]\n\n", true),
            ("data:[DONE]", true),
            ("data: [DONE]x\n", false),
            ("event: message_stop\ndata: {}\n\n", true),
            ("event: response.completed\ndata: {}\n\n", true),
            ("data: {\"a\":1}\n\n", false),
        ] {
            let mut lines = EventLines::default();
            lines.feed(text.as_bytes());
            assert_eq!(lines.ended(), ended, "{text:?}");
        }
    }

    #[test]
    fn growth_is_told_now_and_then() {
        let mut lines = EventLines::default();
        let told: Vec<u32> = (0..17)
            .filter_map(|_| {
                lines.feed(b"data: {}\n\n");
                lines.growth()
            })
            .collect();
        assert_eq!(told, [8, 16]);
    }
}
