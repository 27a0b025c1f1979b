//! The handshake: an HTTP request and its response, which tungstenite encodes and decodes.

use crate::wait::Deadline;
use crate::{Channel, ChannelExt, Error, IoBuf, IoBufMut, RecvFlags, Result, SendFlags};
use rustix::event::PollFlags;
use std::io::{self, Read, Write};
use tungstenite::handshake::HandshakeError;
use tungstenite::handshake::server::{ErrorResponse, Request, Response};
use tungstenite::http::StatusCode;

/// The longest request, or answer, with all its headers.
const HEAD_BYTES_MAX: usize = 16 << 10;
/// End of an HTTP header.
const HEAD_END: &[u8] = b"\r\n\r\n";

pub(super) fn client(channel: &dyn Channel, host: &str, path: &str, deadline: &Deadline<'_>) -> Result<()> {
    let mut words = Words::new(channel, deadline)?;
    let url = format!("ws://{host}{path}");
    match tungstenite::client::client(url.as_str(), &mut words) {
        Ok(_) => Ok(()),
        Err(HandshakeError::Failure(failure)) => Err(words.explain(&failure)),
        Err(HandshakeError::Interrupted(_)) => {
            Err(Error::websocket(channel.peer(), "the handshake was interrupted"))
        }
    }
}

pub(super) fn server(channel: &dyn Channel, path: &str, deadline: &Deadline<'_>) -> Result<()> {
    let mut words = Words::new(channel, deadline)?;
    let mut asked = None;
    #[allow(clippy::result_large_err, reason = "tungstenite's type")]
    let callback = |request: &Request, response: Response| match request.uri().path() {
        found if found == path => Ok(response),
        found => {
            asked = Some(found.to_owned());
            let mut refusal = ErrorResponse::new(None);
            *refusal.status_mut() = StatusCode::NOT_FOUND;
            Err(refusal)
        }
    };
    let shaken = tungstenite::accept_hdr(&mut words, callback);
    let refused = shaken.map(drop).map_err(|failure| match failure {
        HandshakeError::Failure(failure) => Some(failure),
        HandshakeError::Interrupted(_) => None,
    });
    match (refused, asked) {
        (Ok(()), _) => Ok(()),
        (Err(_), Some(asked)) => {
            Err(Error::websocket(channel.peer(), format!("it requested the path {asked}, expected {path}")))
        }
        (Err(Some(failure)), None) => Err(words.explain(&failure)),
        (Err(None), None) => Err(Error::websocket(channel.peer(), "the handshake was interrupted")),
    }
}

/// Adapts a channel to tungstenite. Consumes nothing after the peer's part of the handshake.
struct Words<'a> {
    channel: &'a dyn Channel,
    deadline: &'a Deadline<'a>,
    head: Vec<u8>,
    failure: Option<Error>,
}

impl<'a> Words<'a> {
    fn new(channel: &'a dyn Channel, deadline: &'a Deadline<'a>) -> Result<Self> {
        let needed = crate::Capabilities::PEEK | crate::Capabilities::BIDIRECTIONAL;
        if channel.as_fd().is_some() && channel.capabilities().contains(needed) {
            Ok(Self { channel, deadline, head: Vec::new(), failure: None })
        } else {
            Err(Error::unsupported(channel.peer(), "WebSocket; use a socket"))
        }
    }

    fn explain(&mut self, failure: &tungstenite::Error) -> Error {
        let peer = self.channel.peer();
        if let Some(failure) = self.failure.take() {
            return failure;
        }
        let why = match failure {
            tungstenite::Error::Http(response) => format!(
                "it answered with HTTP {}, expected 101: is this its path, and does it speak WebSocket there?",
                response.status()
            ),
            _ if crate::guess::describe_plain(&self.head).is_some_and(|what| what == "TLS") => {
                "it begins with TLS: use wss:// at both ends, or ws://".into()
            }
            tungstenite::Error::Protocol(tungstenite::error::ProtocolError::HandshakeIncomplete) => {
                "it ended the connection in the handshake: does it speak WebSocket there (wss:// if it wants TLS)?".into()
            }
            failure => format!("it does not speak WebSocket: {failure}"),
        };
        Error::websocket(peer, why)
    }

    fn wait(&self, events: PollFlags) -> Result<()> {
        let fd = self.channel.as_fd().expect("checked at the beginning");
        self.deadline.wait(fd, events)
    }

    fn try_read(&mut self, room: &mut [u8]) -> Result<usize> {
        if self.head.len() >= HEAD_BYTES_MAX || self.head.ends_with(HEAD_END) {
            return Err(Error::websocket(self.channel.peer(), "its part of the handshake has no end"));
        }
        if !self.channel.has_buffered() {
            self.wait(PollFlags::IN)?;
        }
        let seen = self.channel.recv(&mut [IoBufMut::from(&mut *room)], RecvFlags::PEEK)?;
        let before = self.head.len();
        self.head.extend_from_slice(&room[..seen]);
        let searched = before.saturating_sub(HEAD_END.len() - 1);
        let found = self.head[searched..].windows(HEAD_END.len()).position(|window| window == HEAD_END);
        if let Some(found) = found {
            self.head.truncate(searched + found + HEAD_END.len());
        }
        let taken = self.head.len() - before;
        self.channel.recv_exact(&mut [IoBufMut::from(&mut room[..taken])])?;
        Ok(taken)
    }

    fn try_write(&mut self, bytes: &[u8]) -> Result<usize> {
        self.wait(PollFlags::OUT)?;
        self.channel.send(&[IoBuf::from(bytes)], SendFlags::empty())
    }

    fn keep<T>(&mut self, result: Result<T>) -> io::Result<T> {
        result.map_err(|failure| {
            self.failure = Some(failure);
            io::Error::other("see above")
        })
    }
}

impl Read for Words<'_> {
    fn read(&mut self, room: &mut [u8]) -> io::Result<usize> {
        let read = self.try_read(room);
        self.keep(read)
    }
}

impl Write for Words<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.try_write(bytes);
        self.keep(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
