//! Commands and replies, typed and untyped, for several commands at once.

use std::borrow::Cow;

use serde::Serialize;
use serde::de::{Deserialize, DeserializeOwned};
use serde_json::{Map, Value};

use crate::codec::excerpt;
use crate::error::Error;

/// A command with typed arguments and a typed reply. The value itself is serialized as the arguments; a unit
/// struct has none.
pub trait Command: Serialize {
    /// QEMU's name for it.
    const NAME: &'static str;
    /// The type of QEMU's reply.
    type Return: DeserializeOwned;
}

/// A command with its arguments, for [`Client::execute_all`](crate::Client::execute_all).
#[derive(Clone, Debug, PartialEq)]
pub struct CommandRequest {
    pub(crate) name: Cow<'static, str>,
    pub(crate) arguments: Value,
}

/// QEMU's reply to a [`CommandRequest`].
#[derive(Debug)]
#[must_use]
pub struct CommandReply {
    pub(crate) socket: String,
    pub(crate) value: Result<Value, Error>,
}

impl CommandRequest {
    /// The request of a typed command.
    ///
    /// # Errors
    /// [`Error::Arguments`]: its arguments are not JSON.
    pub fn new<C: Command>(command: &C) -> Result<Self, Error> {
        let arguments = serde_json::to_value(command)
            .map_err(|error| Error::Arguments { command: C::NAME.into(), reason: error.to_string() })?;
        Ok(Self { name: C::NAME.into(), arguments })
    }

    /// The request of a command that has no type in this crate.
    pub fn raw(name: &str, arguments: Option<Map<String, Value>>) -> Self {
        Self { name: name.to_owned().into(), arguments: arguments.map_or(Value::Null, Value::Object) }
    }
}

impl CommandReply {
    /// The reply to a command of this type.
    ///
    /// # Errors
    /// [`Error::Refusal`] with QEMU's words, [`Error::Shape`].
    pub fn of<C: Command>(self) -> Result<C::Return, Error> {
        typed::<C>(&self.value?, &self.socket)
    }

    /// The reply as QEMU sent it.
    ///
    /// # Errors
    /// [`Error::Refusal`] with QEMU's words.
    pub fn value(self) -> Result<Value, Error> {
        self.value
    }
}

pub(crate) fn typed<C: Command>(value: &Value, socket: &str) -> Result<C::Return, Error> {
    C::Return::deserialize(value).map_err(|error| Error::Shape {
        command: C::NAME.into(),
        socket: socket.to_owned(),
        reason: error.to_string(),
        excerpt: excerpt(value.to_string().as_bytes()),
    })
}
