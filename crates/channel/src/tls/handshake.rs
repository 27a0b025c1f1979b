//! The handshake: rustls decides what to send and receive, this module waits for the socket.

use super::alert;
use super::credentials::{TlsClient, TlsServer};
use super::keys::{Keys, TlsConnection};
use super::record::Protection;
use crate::guess::describe_plain;
use crate::wait::Deadline;
use crate::{Channel, Error, IoBuf, IoBufMut, RecvFlags, Result, SendFlags};
use rustix::event::PollFlags;
use rustls::client::UnbufferedClientConnection;
use rustls::pki_types::ServerName;
use rustls::server::UnbufferedServerConnection;
use rustls::unbuffered::{ConnectionState, EncodeError};
use rustls::{CommonState, ExtractedSecrets};
use std::os::fd::AsFd;
use std::sync::Arc;

/// Room for the peer's flights. Longer ones (certificates) are refused; rustls' own limit for a message is as
/// high.
const INCOMING_BYTES_MAX: usize = 128 << 10;
/// Initial size of the buffer for our handshake messages.
const OUTGOING_BYTES: usize = 16 << 10;
/// A handshake takes some dozen steps.
const STEPS_MAX: usize = 1000;

/// Result of a handshake.
pub(super) struct Handshaken {
    pub(super) tx: Protection,
    pub(super) rx: Protection,
    pub(super) keys: Keys,
    /// Contents of records received with the last flight.
    pub(super) contents: Vec<u8>,
    /// Records received with it and not opened.
    pub(super) records: Vec<u8>,
    /// See [`super::TlsChannel`].
    pub(super) doubt: String,
}

pub(super) fn client(
    channel: &dyn Channel,
    tls: &TlsClient,
    name: ServerName<'static>,
    deadline: &Deadline<'_>,
) -> Result<Handshaken> {
    let explain = |error: &rustls::Error| alert::at_client(channel.peer(), tls, error);
    let connection = UnbufferedClientConnection::new(Arc::clone(&tls.config), name);
    let mut connection = connection.map_err(|error| explain(&error))?;
    let mut flights = Flights::new(channel, deadline);
    match flights.exchange(&mut connection) {
        Ok(()) => {}
        Err(Broken::Tls(error)) => return Err(explain(&error)),
        Err(Broken::Ended) => return Err(alert::ended_at_client(channel.peer(), tls)),
        Err(Broken::Channel(error)) => return Err(error),
    }
    let (secrets, kernel) = connection.dangerous_into_kernel_connection().map_err(|error| explain(&error))?;
    flights.done(&secrets, TlsConnection::Client(kernel), alert::doubt_at_client(tls))
}

pub(super) fn server(channel: &dyn Channel, tls: &TlsServer, deadline: &Deadline<'_>) -> Result<Handshaken> {
    let explain = |error: &rustls::Error| alert::at_server(channel.peer(), tls, error);
    let connection = UnbufferedServerConnection::new(Arc::clone(&tls.config));
    let mut connection = connection.map_err(|error| explain(&error))?;
    let mut flights = Flights::new(channel, deadline);
    match flights.exchange(&mut connection) {
        Ok(()) => {}
        Err(Broken::Tls(error)) => {
            let plain = describe_plain(&flights.first).filter(|what| *what != "TLS");
            return Err(plain.map_or_else(|| explain(&error), |what| alert::plain(channel.peer(), what)));
        }
        Err(Broken::Ended) => return Err(alert::ended_at_server(channel.peer(), tls, &flights.first)),
        Err(Broken::Channel(error)) => return Err(error),
    }
    let (secrets, kernel) = connection.dangerous_into_kernel_connection().map_err(|error| explain(&error))?;
    flights.done(&secrets, TlsConnection::Server(kernel), alert::doubt_at_server(tls))
}

/// The next step that rustls requests.
enum HandshakeStep {
    /// Written data must be sent, if possible.
    Transmit,
    /// Nothing yet: try again.
    Again,
    /// More of the peer's bytes, unless the handshake is complete.
    Receive,
}

/// Common interface of rustls' two kinds of connection.
trait Stepping {
    /// Takes from what was received; appends to what is sent, and to the contents.
    fn step(&mut self, flights: &mut Flights<'_>) -> Result<HandshakeStep, rustls::Error>;

    fn state(&self) -> &CommonState;
}

macro_rules! stepping {
    ($($connection:ty),*) => {$(
        impl Stepping for $connection {
            fn step(&mut self, flights: &mut Flights<'_>) -> Result<HandshakeStep, rustls::Error> {
                let status = self.process_tls_records(&mut flights.incoming);
                let mut discard = status.discard;
                let step = match status.state {
                    Err(error) => Err(error),
                    Ok(ConnectionState::EncodeTlsData(mut encode)) => {
                        append(&mut flights.outgoing, |room| match encode.encode(room) {
                            Ok(length) => Ok(length),
                            Err(EncodeError::InsufficientSize(need)) => Err(need.required_size),
                            Err(EncodeError::AlreadyEncoded) => Ok(0),
                        });
                        Ok(HandshakeStep::Again)
                    }
                    Ok(ConnectionState::TransmitTlsData(transmit)) => {
                        transmit.done();
                        Ok(HandshakeStep::Transmit)
                    }
                    Ok(ConnectionState::ReadTraffic(mut traffic)) => {
                        let mut read = Ok(HandshakeStep::Again);
                        while let Some(record) = traffic.next_record() {
                            match record {
                                Ok(record) => {
                                    discard += record.discard;
                                    flights.contents.extend_from_slice(record.payload);
                                }
                                Err(error) => {
                                    read = Err(error);
                                    break;
                                }
                            }
                        }
                        read
                    }
                    Ok(ConnectionState::BlockedHandshake | ConnectionState::WriteTraffic(_)) => {
                        Ok(HandshakeStep::Receive)
                    }
                    Ok(_) => Err(rustls::Error::HandshakeNotComplete),
                };
                flights.incoming.drain(..discard);
                step
            }

            fn state(&self) -> &CommonState {
                self
            }
        }
    )*};
}
stepping!(UnbufferedClientConnection, UnbufferedServerConnection);

/// Makes `write` append to `bytes`; it returns the number of bytes written, or the size needed.
fn append(bytes: &mut Vec<u8>, mut write: impl FnMut(&mut [u8]) -> Result<usize, usize>) {
    let old = bytes.len();
    let mut room = OUTGOING_BYTES;
    loop {
        bytes.resize(old + room, 0);
        match write(&mut bytes[old..]) {
            Ok(length) => {
                bytes.truncate(old + length);
                return;
            }
            Err(need) => room = need.max(room + 1),
        }
    }
}

/// Reason why a handshake was aborted.
enum Broken {
    Tls(rustls::Error),
    /// The peer closed the connection.
    Ended,
    Channel(Error),
}

impl From<Error> for Broken {
    fn from(error: Error) -> Self {
        match error.raw_os_error() {
            Some(libc::EPIPE | libc::ECONNRESET) => Self::Ended,
            _ => Self::Channel(error),
        }
    }
}

/// The bytes of a handshake, each way.
struct Flights<'a> {
    channel: &'a dyn Channel,
    deadline: &'a Deadline<'a>,
    incoming: Vec<u8>,
    outgoing: Vec<u8>,
    contents: Vec<u8>,
    /// The peer's first bytes, to recognize other protocols.
    first: Vec<u8>,
}

impl<'a> Flights<'a> {
    fn new(channel: &'a dyn Channel, deadline: &'a Deadline<'a>) -> Self {
        let (incoming, outgoing, contents) = (Vec::new(), Vec::new(), Vec::new());
        Self { channel, deadline, incoming, outgoing, contents, first: Vec::new() }
    }

    fn exchange(&mut self, connection: &mut impl Stepping) -> Result<(), Broken> {
        for _ in 0..STEPS_MAX {
            match connection.step(self) {
                Ok(HandshakeStep::Again) => {}
                Ok(HandshakeStep::Transmit) => self.transmit()?,
                Ok(HandshakeStep::Receive) => {
                    self.transmit()?;
                    if !connection.state().is_handshaking() {
                        return Ok(());
                    }
                    self.receive()?;
                }
                Err(error) => {
                    self.send_alert(connection);
                    return Err(Broken::Tls(error));
                }
            }
        }
        Err(Broken::Tls(rustls::Error::HandshakeNotComplete))
    }

    /// Sends the pending alert, if the peer still receives.
    fn send_alert(&mut self, connection: &mut impl Stepping) {
        // Only while it has data to send: it must not process the same bytes again.
        while connection.state().wants_write() {
            if !matches!(connection.step(self), Ok(HandshakeStep::Again)) {
                break;
            }
        }
        let _ = self.transmit();
    }

    fn transmit(&mut self) -> Result<(), Broken> {
        let mut sent = 0;
        while sent < self.outgoing.len() {
            self.wait(PollFlags::OUT)?;
            sent += self.channel.send(&[IoBuf::from(&self.outgoing[sent..])], SendFlags::empty())?;
        }
        self.outgoing.clear();
        Ok(())
    }

    fn receive(&mut self) -> Result<(), Broken> {
        let old = self.incoming.len();
        if old == INCOMING_BYTES_MAX {
            return Err(Broken::Tls(rustls::Error::PeerSentOversizedRecord));
        }
        self.wait(PollFlags::IN)?;
        self.incoming.resize(INCOMING_BYTES_MAX.min(old + OUTGOING_BYTES), 0);
        let received =
            self.channel.recv(&mut [IoBufMut::from(&mut self.incoming[old..])], RecvFlags::empty());
        self.incoming.truncate(old + received.as_ref().copied().unwrap_or(0));
        if received? == 0 {
            return Err(Broken::Ended);
        }
        if self.first.len() < alert::MAGIC_BYTES {
            self.first.extend_from_slice(&self.incoming[old..]);
            self.first.truncate(alert::MAGIC_BYTES);
        }
        Ok(())
    }

    fn wait(&self, events: PollFlags) -> Result<(), Broken> {
        let fd = self.channel.as_fd().expect("checked before the handshake");
        Ok(self.deadline.wait(fd.as_fd(), events)?)
    }

    fn done(
        self,
        secrets: &ExtractedSecrets,
        connection: TlsConnection,
        doubt: String,
    ) -> Result<Handshaken> {
        let unknown =
            || Error::tls(self.channel.peer(), "the cipher that both ends agreed on is unknown here");
        let tx = Protection::new(secrets.tx.0, &secrets.tx.1).ok_or_else(unknown)?;
        let rx = Protection::new(secrets.rx.0, &secrets.rx.1).ok_or_else(unknown)?;
        let keys = Keys::new(connection);
        Ok(Handshaken { tx, rx, keys, contents: self.contents, records: self.incoming, doubt })
    }
}
