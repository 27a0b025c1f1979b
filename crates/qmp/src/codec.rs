//! Bytes to QMP messages, without I/O.
//!
//! [`Decoder::feed`] takes bytes in any pieces, [`Decoder::next_message`] returns the messages they complete.
//! Framing does not rely on line ends: a message is one JSON object, found by its brackets, so `-qmp-pretty`
//! reads the same. Every byte is scanned once, so a large reply in small pieces costs no more than in one.
//!
//! Unknown input (events, keys, whole messages) is kept as JSON, never dropped.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// The longest message accepted. QEMU's largest reply, `query-qmp-schema`, is about 250 KB.
pub const MESSAGE_BYTES_MAX: usize = 16 << 20;
/// The deepest nesting accepted; what `serde_json` parses without risk to the stack.
pub const DEPTH_MAX: usize = 127;
/// Bytes of an unreadable message that the error quotes.
pub const EXCERPT_BYTES_MAX: usize = 80;

/// One message from a QMP server.
#[derive(Clone, Debug, PartialEq)]
pub enum Message {
    /// The first message on a connection.
    Greeting(Greeting),
    /// A command succeeded.
    Return {
        /// The command's `id`, if it had one.
        id: Option<Value>,
        /// The return value.
        value: Value,
        /// Unknown keys.
        other: Map<String, Value>,
    },
    /// A command failed.
    Error {
        /// The command's `id`; absent also where QEMU could not read the command.
        id: Option<Value>,
        /// QEMU's error class, for example `CommandNotFound`.
        class: String,
        /// The error in words.
        desc: String,
        /// Keys that we do not know.
        other: Map<String, Value>,
    },
    /// Something happened in QEMU.
    Event(Event),
    /// An object of another kind.
    Other(Map<String, Value>),
}

/// The greeting of a QMP server.
#[derive(Clone, Debug, PartialEq, Default, Serialize, Deserialize)]
pub struct Greeting {
    /// QEMU's version, in the form of `query-version`'s reply.
    #[serde(default)]
    pub version: Value,
    /// Optional abilities of the server, for example `oob`.
    #[serde(default)]
    pub capabilities: Vec<Value>,
    /// Keys that we do not know.
    #[serde(flatten)]
    pub other: Map<String, Value>,
}

/// Something that happened in QEMU.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Event {
    /// Name of the event, for example `MIGRATION`.
    #[serde(rename = "event")]
    pub name: String,
    /// Data of the event; empty for many.
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    pub data: Map<String, Value>,
    /// When, by the clock of QEMU's host.
    #[serde(default)]
    pub timestamp: EventTimestamp,
    /// Keys that we do not know.
    #[serde(flatten)]
    pub other: Map<String, Value>,
}

/// Time since 1970; both fields are -1 where QEMU could not read its clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct EventTimestamp {
    /// Whole seconds.
    pub seconds: i64,
    /// Microseconds beyond them.
    pub microseconds: i64,
}

/// Reason for which bytes are not QMP. The peer's fault; nothing after it can be decoded.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CodecError {
    /// Something other than a JSON object where a message should begin.
    #[error("expected a QMP message (a JSON object), found \"{excerpt}\"")]
    NotJson {
        /// The first bytes found.
        excerpt: String,
    },
    /// An object that is not valid JSON, or a message whose keys have the wrong types.
    #[error("unreadable QMP message ({reason}): \"{excerpt}\"")]
    Malformed {
        /// The parser's message.
        reason: String,
        /// The first bytes of the message.
        excerpt: String,
    },
    /// More than the decoder's limit.
    #[error("a QMP message longer than {bytes_max} bytes: \"{excerpt}\"")]
    TooLong {
        /// The limit.
        bytes_max: usize,
        /// The first bytes of the message.
        excerpt: String,
    },
    /// More than [`DEPTH_MAX`].
    #[error("a QMP message nested deeper than {DEPTH_MAX} levels: \"{excerpt}\"")]
    TooDeep {
        /// The first bytes of the message.
        excerpt: String,
    },
}

/// Finds messages in bytes.
#[derive(Debug)]
pub struct Decoder {
    buffer: Vec<u8>,
    /// Where the message under way begins.
    start: usize,
    /// Position up to which the buffer has been scanned.
    scanned: usize,
    depth: usize,
    in_string: bool,
    escaped: bool,
    failed: Option<CodecError>,
    bytes_max: usize,
}

impl Default for Decoder {
    fn default() -> Self {
        Self::with_limit(MESSAGE_BYTES_MAX)
    }
}

impl Decoder {
    /// A decoder at the beginning of a connection.
    pub fn new() -> Self {
        Self::default()
    }

    /// Creates a decoder that refuses messages longer than this.
    pub fn with_limit(bytes_max: usize) -> Self {
        Self {
            buffer: Vec::new(),
            start: 0,
            scanned: 0,
            depth: 0,
            in_string: false,
            escaped: false,
            failed: None,
            bytes_max,
        }
    }

    /// Appends received bytes. Call [`Decoder::next_message`] until it returns `None` before feeding more, so
    /// no more than one message is ever held.
    pub fn feed(&mut self, bytes: &[u8]) {
        if self.failed.is_some() {
            return;
        }
        self.buffer.drain(..self.start);
        self.scanned -= self.start;
        self.start = 0;
        self.buffer.extend_from_slice(bytes);
    }

    /// The next complete message; `None` until more bytes are fed.
    ///
    /// # Errors
    /// A [`CodecError`], which every later call repeats.
    pub fn next_message(&mut self) -> Result<Option<Message>, CodecError> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        let result = self.scan();
        if let Err(error) = &result {
            self.failed = Some(error.clone());
            self.buffer = Vec::new();
        }
        result
    }

    fn scan(&mut self) -> Result<Option<Message>, CodecError> {
        while let Some(&byte) = self.buffer.get(self.scanned) {
            if self.depth == 0 {
                match byte {
                    b' ' | b'\t' | b'\r' | b'\n' => self.start = self.scanned + 1,
                    b'{' => (self.start, self.depth) = (self.scanned, 1),
                    _ => return Err(CodecError::NotJson { excerpt: excerpt(&self.buffer[self.scanned..]) }),
                }
                self.scanned += 1;
                continue;
            }
            if self.scanned - self.start >= self.bytes_max {
                return Err(CodecError::TooLong {
                    bytes_max: self.bytes_max,
                    excerpt: excerpt(&self.buffer[self.start..]),
                });
            }
            self.scanned += 1;
            self.bracket(byte)?;
            if self.depth == 0 {
                let message = parse(&self.buffer[self.start..self.scanned])?;
                self.start = self.scanned;
                return Ok(Some(message));
            }
        }
        Ok(None)
    }

    /// Tracks strings and brackets; the content is up to the parser.
    fn bracket(&mut self, byte: u8) -> Result<(), CodecError> {
        if self.in_string {
            match byte {
                _ if self.escaped => self.escaped = false,
                b'\\' => self.escaped = true,
                b'"' => self.in_string = false,
                _ => {}
            }
            return Ok(());
        }
        match byte {
            b'"' => self.in_string = true,
            b'{' | b'[' if self.depth == DEPTH_MAX => {
                return Err(CodecError::TooDeep { excerpt: excerpt(&self.buffer[self.start..]) });
            }
            b'{' | b'[' => self.depth += 1,
            b'}' | b']' => self.depth -= 1,
            _ => {}
        }
        Ok(())
    }
}

fn parse(bytes: &[u8]) -> Result<Message, CodecError> {
    let malformed = |error: serde_json::Error| CodecError::Malformed {
        reason: error.to_string(),
        excerpt: excerpt(bytes),
    };
    let object: Map<String, Value> = serde_json::from_slice(bytes).map_err(malformed)?;
    classify(object).map_err(malformed)
}

fn classify(mut object: Map<String, Value>) -> Result<Message, serde_json::Error> {
    #[derive(Deserialize)]
    struct ErrorReply {
        class: String,
        desc: String,
    }
    if object.contains_key("event") {
        return serde_json::from_value(Value::Object(object)).map(Message::Event);
    }
    if let Some(value) = object.remove("return") {
        return Ok(Message::Return { id: object.remove("id"), value, other: object });
    }
    if let Some(error) = object.remove("error") {
        let ErrorReply { class, desc } = serde_json::from_value(error)?;
        return Ok(Message::Error { id: object.remove("id"), class, desc, other: object });
    }
    if let Some(greeting) = object.remove("QMP") {
        return serde_json::from_value(greeting).map(Message::Greeting);
    }
    Ok(Message::Other(object))
}

/// The beginning of `bytes`, printable.
pub(crate) fn excerpt(bytes: &[u8]) -> String {
    let shown = &bytes[..bytes.len().min(EXCERPT_BYTES_MAX)];
    let more = if shown.len() < bytes.len() { "…" } else { "" };
    format!("{}{more}", shown.escape_ascii())
}
