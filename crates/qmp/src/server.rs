//! The other end of QMP: what a running towline answers to on a Unix socket, to the tools that people have for QEMU.
//!
//! ```text
//! acceptor ── per client: reader ── Commands::execute ─► outbox ── writer
//!                                        emit(event) ─────┘ of every client that has negotiated
//! ```
//!
//! Clients are served side by side, each by two threads of its own, so that neither another client nor the data that moves meanwhile
//! keeps one waiting. A client that does not read is disconnected once its outbox is full; nobody waits for it.
//!
//! Limits: [`CLIENTS_MAX`] at once; a request is at most [`REQUEST_BYTES_MAX`] long; no out-of-band commands, no descriptors. The
//! socket's file is for its owner only.

use std::net::Shutdown;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde_json::{Map, Value, json};
use towline_channel::{
    Address, Cancel, Channel, ChannelExt as _, IoBuf, IoBufMut, Listener, RecvFlags, SendFlags,
};

use crate::codec::{Decoder, Message};

/// Clients served at once; one more is turned away.
pub const CLIENTS_MAX: usize = 16;
/// The longest request. What towline is told is short.
pub const REQUEST_BYTES_MAX: usize = 64 << 10;
/// Messages that may wait for a client to read them.
const OUTBOX_MESSAGES_MAX: usize = 256;
/// How long a client may take to read one message while others wait behind it.
const WRITE_TIMEOUT: Duration = Duration::from_secs(2);
/// An acceptor waits again after so long; nothing depends on it.
const ACCEPT_WITHIN: Duration = Duration::from_secs(3600);
/// How long the acceptor rests when it can take nobody (no descriptors left).
const REST: Duration = Duration::from_millis(100);

/// What a server can do besides what every one does (`qmp_capabilities`, `query-version`, `query-commands`).
pub trait Commands: Send + Sync {
    /// The names of its commands.
    fn names(&self) -> &[&'static str];

    /// Runs one of them; it is answered when this returns, so it does not wait for what it begins.
    ///
    /// # Errors
    /// A [`Refusal`], which the client reads.
    fn execute(&self, name: &str, arguments: &Map<String, Value>) -> Result<Value, Refusal>;
}

/// Why a command is not done, in QMP's classes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Refusal {
    /// There is no such command (`CommandNotFound`).
    Unknown,
    /// Anything else, in words (`GenericError`).
    Because(String),
}

impl Refusal {
    /// `GenericError` with these words.
    pub fn because(text: impl Into<String>) -> Self {
        Self::Because(text.into())
    }
}

/// A server; dropping it ends it, its file, and its clients' connections when they have read what was said.
#[derive(Debug)]
pub struct Server {
    shared: Arc<Shared>,
    acceptor: Option<JoinHandle<()>>,
}

struct Shared {
    commands: Arc<dyn Commands>,
    stop: Cancel,
    clients: Mutex<Vec<Arc<Client>>>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    served: AtomicUsize,
}

struct Client {
    channel: Box<dyn Channel>,
    outbox: SyncSender<String>,
    /// It has said `qmp_capabilities`, and hears events from then on.
    negotiated: AtomicBool,
    /// Held from a request until its answer is in the outbox: one that ends the server is answered before that ends.
    answering: Mutex<()>,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared").field("served", &self.served).finish_non_exhaustive()
    }
}

impl Server {
    /// Listens at `path`.
    ///
    /// # Errors
    /// Those of [`Listener::bind`]: somebody else listens there, or it cannot be made.
    pub fn start(path: &Path, commands: Arc<dyn Commands>) -> towline_channel::Result<Self> {
        let stop = Cancel::new()?;
        let listener = Listener::bind(&Address::Unix(path.to_owned()))?;
        // Whoever may connect may cancel, and end us.
        if let Err(error) = std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600)) {
            tracing::warn!(%error, path = %path.display(), "the control socket is open to whoever its directory is open to");
        }
        let (clients, threads) = (Mutex::default(), Mutex::default());
        let shared = Arc::new(Shared { commands, stop, clients, threads, served: AtomicUsize::new(0) });
        let acceptor = thread::spawn({
            let shared = Arc::clone(&shared);
            move || shared.accept(&listener)
        });
        Ok(Self { shared, acceptor: Some(acceptor) })
    }

    /// Who tells its clients of events; it may outlive the server.
    pub fn emitter(&self) -> Emitter {
        Emitter(Arc::downgrade(&self.shared))
    }
}

/// Tells a server's clients that something happened.
#[derive(Debug, Clone)]
pub struct Emitter(Weak<Shared>);

impl Emitter {
    /// Tells every client that has negotiated. Does not wait for any.
    pub fn emit(&self, event: &str, data: Map<String, Value>) {
        let Some(shared) = self.0.upgrade() else { return };
        let mut message = json!({ "event": event, "timestamp": timestamp() });
        if !data.is_empty() {
            message["data"] = Value::Object(data);
        }
        let text = line(&message);
        for client in shared.clients().iter() {
            if client.negotiated.load(Ordering::Acquire) {
                client.post(text.clone());
            }
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.shared.stop.cancel();
        if let Some(acceptor) = self.acceptor.take() {
            // It does not panic; if it did, its listener is gone all the same.
            let _ = acceptor.join();
        }
        let clients: Vec<_> = self.shared.clients().drain(..).collect();
        for client in clients {
            let _answered = client.answering.lock().unwrap_or_else(PoisonError::into_inner);
            client.leave();
        }
        for thread in self.shared.threads().drain(..) {
            // A client's thread that panicked has nothing more to say.
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn clients(&self) -> MutexGuard<'_, Vec<Arc<Client>>> {
        self.clients.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn threads(&self) -> MutexGuard<'_, Vec<JoinHandle<()>>> {
        self.threads.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn accept(self: &Arc<Self>, listener: &Listener) {
        while !self.stop.is_cancelled() {
            match listener.accept(Instant::now() + ACCEPT_WITHIN, &self.stop) {
                Ok(channel) => self.welcome(channel),
                Err(towline_channel::Error::Timeout { .. } | towline_channel::Error::Cancelled) => {}
                Err(error) => {
                    tracing::warn!(%error, "a client of the control socket cannot be taken");
                    thread::sleep(REST);
                }
            }
        }
    }

    /// Starts a client's threads; they end with its connection.
    fn welcome(self: &Arc<Self>, channel: Box<dyn Channel>) {
        if self.served.fetch_add(1, Ordering::AcqRel) >= CLIENTS_MAX {
            self.served.fetch_sub(1, Ordering::AcqRel);
            tracing::warn!("a client of the control socket is turned away: {CLIENTS_MAX} are there");
            return;
        }
        let (outbox, messages) = sync_channel(OUTBOX_MESSAGES_MAX);
        let client = Arc::new(Client {
            channel,
            outbox,
            negotiated: AtomicBool::new(false),
            answering: Mutex::default(),
        });
        self.clients().push(Arc::clone(&client));
        let shared = Arc::clone(self);
        let mut threads = self.threads();
        threads.retain(|thread| !thread.is_finished());
        threads.push(thread::spawn(move || {
            thread::scope(|scope| {
                let writes = &client;
                scope.spawn(move || writes.write(&messages));
                client.read(&shared);
                client.leave();
            });
            shared.clients().retain(|other| !Arc::ptr_eq(other, &client));
            shared.served.fetch_sub(1, Ordering::AcqRel);
        }));
    }

    fn answer(&self, client: &Client, mut request: Map<String, Value>) -> Value {
        let id = request.remove("id");
        let mut answer = match self.execute(client, &mut request) {
            Ok(value) => json!({ "return": value }),
            Err((class, desc)) => json!({ "error": { "class": class, "desc": desc } }),
        };
        if let Some(id) = id {
            answer["id"] = id;
        }
        answer
    }

    fn execute(
        &self,
        client: &Client,
        request: &mut Map<String, Value>,
    ) -> Result<Value, (&'static str, String)> {
        let generic = |text: &str| ("GenericError", text.to_owned());
        let Some(Value::String(name)) = request.remove("execute") else {
            return Err(generic("QMP input lacks member 'execute', a string"));
        };
        let arguments = match request.remove("arguments") {
            None => Map::new(),
            Some(Value::Object(arguments)) => arguments,
            Some(_) => return Err(generic("QMP input member 'arguments' must be an object")),
        };
        if let Some(key) = request.keys().next() {
            return Err(generic(&format!("QMP input member '{key}' is unexpected")));
        }
        let negotiated = client.negotiated.load(Ordering::Acquire);
        match name.as_str() {
            "qmp_capabilities" if negotiated => Err((
                "CommandNotFound",
                "Capabilities negotiation is already complete, command ignored".to_owned(),
            )),
            "qmp_capabilities" => {
                client.negotiated.store(true, Ordering::Release);
                Ok(json!({}))
            }
            _ if !negotiated => Err((
                "CommandNotFound",
                format!("Expecting capabilities negotiation with 'qmp_capabilities', found '{name}'"),
            )),
            "query-version" => Ok(version()),
            "query-commands" => {
                let own = ["qmp_capabilities", "query-version", "query-commands"];
                let names = own.iter().chain(self.commands.names());
                Ok(names.map(|name| json!({ "name": name })).collect())
            }
            name => self.commands.execute(name, &arguments).map_err(|refusal| match refusal {
                Refusal::Unknown => ("CommandNotFound", format!("The command {name} has not been found")),
                Refusal::Because(text) => ("GenericError", text),
            }),
        }
    }
}

impl Client {
    /// Answers what it asks, in order, until it leaves.
    fn read(&self, shared: &Shared) {
        self.post(line(&json!({ "QMP": { "version": version(), "capabilities": [] } })));
        let mut decoder = Decoder::with_limit(REQUEST_BYTES_MAX);
        let mut bytes = [0; 4096];
        loop {
            match self.channel.recv(&mut [IoBufMut::from(&mut bytes[..])], RecvFlags::empty()) {
                Ok(0) | Err(_) => return,
                Ok(count) => decoder.feed(&bytes[..count]),
            }
            loop {
                let _answering = self.answering.lock().unwrap_or_else(PoisonError::into_inner);
                let answer = match decoder.next_message() {
                    Ok(None) => break,
                    Ok(Some(Message::Other(request))) => shared.answer(self, request),
                    Ok(Some(_)) => {
                        json!({ "error": { "class": "GenericError", "desc": "this is a server's message, expected a command" } })
                    }
                    Err(error) => {
                        // Where the next request begins cannot be known.
                        self.post(line(
                            &json!({ "error": { "class": "GenericError", "desc": error.to_string() } }),
                        ));
                        return;
                    }
                };
                self.post(line(&answer));
            }
        }
    }

    fn write(&self, messages: &Receiver<String>) {
        let _ = self.channel.set_timeouts(None, Some(WRITE_TIMEOUT));
        // An empty one is the last.
        while let Some(text) = messages.recv().ok().filter(|text| !text.is_empty()) {
            if self.channel.send_all(&[IoBuf::from(text.as_bytes())], SendFlags::empty()).is_err() {
                break;
            }
        }
        let _ = self.channel.shutdown(Shutdown::Both);
    }

    fn post(&self, text: String) {
        if let Err(TrySendError::Full(_)) = self.outbox.try_send(text) {
            tracing::warn!("a client of the control socket does not read, and is disconnected");
            let _ = self.channel.shutdown(Shutdown::Both);
        }
    }

    /// Lets the writer send what waits, and end.
    fn leave(&self) {
        if self.outbox.try_send(String::new()).is_err() {
            let _ = self.channel.shutdown(Shutdown::Both);
        }
    }
}

fn line(message: &Value) -> String {
    format!("{message}\r\n")
}

/// As `query-version` has it. The numbers are towline's own: clients of QEMU look at them to know what they may ask.
fn version() -> Value {
    let part = |text: &str| text.parse::<u64>().unwrap_or(0);
    json!({
        "qemu": {
            "major": part(env!("CARGO_PKG_VERSION_MAJOR")),
            "minor": part(env!("CARGO_PKG_VERSION_MINOR")),
            "micro": part(env!("CARGO_PKG_VERSION_PATCH")),
        },
        "package": concat!("towline ", env!("CARGO_PKG_VERSION")),
    })
}

fn timestamp() -> Value {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    json!({ "seconds": now.as_secs(), "microseconds": now.subsec_micros() })
}
