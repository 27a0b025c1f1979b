//! The server side of QMP: a control socket that tools made for QEMU can use.
//!
//! ```text
//! acceptor ── per client: reader ── Commands::execute ─► outbox ── writer
//!                                        emit(event) ─────┘ of every client that has negotiated
//! ```
//!
//! Clients are served concurrently, each by two threads, so no client delays another and the data path delays
//! none. A client that does not read is disconnected once its outbox is full; the server never blocks on it.
//!
//! Limits: [`CLIENTS_MAX`] clients; requests of at most [`REQUEST_BYTES_MAX`]; no out-of-band commands, no
//! descriptors. Only the owner may connect (mode 0600).

use std::net::Shutdown;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, Weak};
use std::thread::{self, Builder, JoinHandle};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde_json::{Map, Value, json};
use towline_channel::lock::lock;
use towline_channel::{
    Address, Cancel, Channel, ChannelExt as _, IoBuf, IoBufMut, Listener, RecvFlags, SendFlags,
};

use crate::codec::{Decoder, Message};

/// Maximum number of concurrent clients; further connections are closed.
pub const CLIENTS_MAX: usize = 16;
/// Maximum length of a request, in bytes.
pub const REQUEST_BYTES_MAX: usize = 256 << 10;
/// Maximum number of unsent messages per client.
const OUTBOX_MESSAGES_MAX: usize = 256;
/// Timeout for sending one message.
const WRITE_TIMEOUT: Duration = Duration::from_secs(2);
/// Timeout of one wait in `accept`, which is then repeated; nothing depends on it.
const ACCEPT_WITHIN: Duration = Duration::from_secs(3600);
/// Delay after a failed `accept`, for example when the process is out of descriptors.
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(100);

/// The commands of a server, in addition to the built-in ones (`qmp_capabilities`, `query-version`,
/// `query-commands`).
pub trait Commands: Send + Sync {
    /// The names of its commands.
    fn names(&self) -> &[&'static str];

    /// Executes a command. The reply is sent when this returns, so it must not wait for the completion of
    /// what it starts.
    ///
    /// # Errors
    /// A [`CommandError`], which is sent to the client as an error reply.
    fn execute(&self, name: &str, arguments: &Map<String, Value>) -> Result<Value, CommandError>;
}

/// Reason for which a command fails, by QMP's error classes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CommandError {
    /// No such command (`CommandNotFound`).
    NotFound,
    /// Any other reason, as text (`GenericError`).
    Generic(String),
}

impl CommandError {
    /// `GenericError` with this text.
    pub fn generic(text: impl Into<String>) -> Self {
        Self::Generic(text.into())
    }
}

/// A listening server. Dropping it removes the socket's file and closes the clients' connections after their
/// pending replies.
#[derive(Debug)]
pub struct Server {
    shared: Arc<Shared>,
    acceptor: Option<JoinHandle<()>>,
}

struct Shared {
    commands: Arc<dyn Commands>,
    stop: Cancel,
    clients: Mutex<Vec<Arc<ConnectedClient>>>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

struct ConnectedClient {
    channel: Box<dyn Channel>,
    outbox: SyncSender<String>,
    /// True once it has sent `qmp_capabilities`; it receives events from then on.
    negotiated: AtomicBool,
    /// Held from a request until its reply is queued, so a command that ends the server is still answered.
    answering: Mutex<()>,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared").field("clients", &lock(&self.clients).len()).finish_non_exhaustive()
    }
}

impl Server {
    /// Listens at `path`.
    ///
    /// # Errors
    /// As [`Listener::bind`]: another process listens there, or the socket cannot be created.
    pub fn start(path: &Path, commands: Arc<dyn Commands>) -> towline_channel::Result<Self> {
        let stop = Cancel::new()?;
        let listener = Listener::bind(&Address::Unix(path.to_owned()))?;
        if let Err(error) = restrict_to_owner(path) {
            tracing::warn!(%error, path = %path.display(), "control socket: cannot restrict access to its owner");
        }
        let (clients, threads) = (Mutex::default(), Mutex::default());
        let shared = Arc::new(Shared { commands, stop, clients, threads });
        let accepting = Arc::clone(&shared);
        let acceptor = Builder::new().spawn(move || accepting.accept(&listener));
        Ok(Self { shared, acceptor: Some(acceptor.map_err(towline_channel::Error::NoThread)?) })
    }

    /// A handle that sends events to the clients; it may outlive the server.
    pub fn emitter(&self) -> Emitter {
        Emitter(Arc::downgrade(&self.shared))
    }
}

/// Restricts the socket to its owner, since a client may cancel a migration and end this process. With the
/// umask of a caller that may not change permissions (a sandbox) it is so already.
fn restrict_to_owner(path: &Path) -> std::io::Result<()> {
    let mut permissions = std::fs::symlink_metadata(path)?.permissions();
    if permissions.mode() & 0o077 == 0 {
        return Ok(());
    }
    permissions.set_mode(0o600);
    std::fs::set_permissions(path, permissions)
}

/// Sends events to a server's clients.
#[derive(Debug, Clone)]
pub struct Emitter(Weak<Shared>);

impl Emitter {
    /// Sends an event to every client that has negotiated. Does not block.
    pub fn emit(&self, event: &str, data: Map<String, Value>) {
        let Some(shared) = self.0.upgrade() else { return };
        let text = Dialogue::event(event, data);
        for client in lock(&shared.clients).iter() {
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
            // If it panicked, its listener is closed anyway.
            let _ = acceptor.join();
        }
        let clients: Vec<_> = lock(&self.shared.clients).drain(..).collect();
        for client in clients {
            let _answered = lock(&client.answering);
            client.finish();
        }
        for thread in lock(&self.shared.threads).drain(..) {
            // If it panicked, its connection is closed anyway.
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn accept(self: &Arc<Self>, listener: &Listener) {
        while !self.stop.is_cancelled() {
            match listener.accept(Instant::now() + ACCEPT_WITHIN, &self.stop) {
                Ok(channel) => self.serve(channel),
                Err(towline_channel::Error::Timeout { .. } | towline_channel::Error::Cancelled) => {}
                Err(error) => {
                    tracing::warn!(%error, "control socket: cannot accept a client");
                    thread::sleep(ACCEPT_RETRY_DELAY);
                }
            }
        }
    }

    /// Starts a client's threads, which end with its connection.
    fn serve(self: &Arc<Self>, channel: Box<dyn Channel>) {
        if lock(&self.clients).len() >= CLIENTS_MAX {
            tracing::warn!("control socket: too many clients (max {CLIENTS_MAX})");
            return;
        }
        let (outbox, messages) = sync_channel(OUTBOX_MESSAGES_MAX);
        let client = Arc::new(ConnectedClient {
            channel,
            outbox,
            negotiated: AtomicBool::new(false),
            answering: Mutex::default(),
        });
        lock(&self.clients).push(Arc::clone(&client));
        let (shared, served) = (Arc::clone(self), Arc::clone(&client));
        let serve = move || {
            thread::scope(|scope| {
                let writes = &served;
                let write = move || writes.write(&messages);
                match Builder::new().spawn_scoped(scope, write) {
                    Ok(_) => served.read(&shared),
                    Err(error) => tracing::warn!(%error, "control socket: a client"),
                }
                served.finish();
            });
            shared.forget(&served);
        };
        let mut threads = lock(&self.threads);
        threads.retain(|thread| !thread.is_finished());
        match Builder::new().spawn(serve) {
            Ok(thread) => threads.push(thread),
            Err(error) => {
                tracing::warn!(%error, "control socket: a client");
                self.forget(&client);
            }
        }
    }

    fn forget(&self, client: &Arc<ConnectedClient>) {
        lock(&self.clients).retain(|other| !Arc::ptr_eq(other, client));
    }
}

/// The requests of one client and the replies to them, without I/O: for a client that is not connected to a [`Server`].
#[derive(Debug)]
pub struct Dialogue {
    decoder: Decoder,
}

/// A request that cannot be read. The beginning of the next one is unknown, so the client is disconnected after this last reply.
#[derive(Debug)]
pub struct Unreadable(pub String);

impl Dialogue {
    /// Of requests of at most this length in bytes.
    pub fn new(request_bytes_max: usize) -> Self {
        Self { decoder: Decoder::with_limit(request_bytes_max) }
    }

    /// The first line that a client reads, with further members.
    pub fn greeting(other: Map<String, Value>) -> String {
        let mut greeting = json!({ "version": version(), "capabilities": [] });
        greeting.as_object_mut().expect("made so").extend(other);
        line(&json!({ "QMP": greeting }))
    }

    /// A line with an event.
    pub fn event(name: &str, data: Map<String, Value>) -> String {
        let mut message = json!({ "event": name, "timestamp": timestamp() });
        if !data.is_empty() {
            message["data"] = Value::Object(data);
        }
        line(&message)
    }

    /// Takes bytes of the client.
    pub fn feed(&mut self, bytes: &[u8]) {
        self.decoder.feed(bytes);
    }

    /// Executes the next request whose bytes are complete, and returns the line of its reply. `negotiated` is set once the client has
    /// sent `qmp_capabilities`.
    ///
    /// # Errors
    /// [`Unreadable`].
    pub fn next_reply(
        &mut self,
        commands: &dyn Commands,
        negotiated: &AtomicBool,
    ) -> Result<Option<String>, Unreadable> {
        let generic = |desc: &str| line(&json!({ "error": { "class": "GenericError", "desc": desc } }));
        match self.decoder.next_message() {
            Ok(None) => Ok(None),
            Ok(Some(Message::Other(request))) => Ok(Some(line(&answer(commands, negotiated, request)))),
            Ok(Some(_)) => Ok(Some(generic("this is a server's message, expected a command"))),
            Err(error) => Err(Unreadable(generic(&error.to_string()))),
        }
    }
}

fn answer(commands: &dyn Commands, negotiated: &AtomicBool, mut request: Map<String, Value>) -> Value {
    let id = request.remove("id");
    let mut answer = match execute(commands, negotiated, &mut request) {
        Ok(value) => json!({ "return": value }),
        Err((class, desc)) => json!({ "error": { "class": class, "desc": desc } }),
    };
    if let Some(id) = id {
        answer["id"] = id;
    }
    answer
}

fn execute(
    commands: &dyn Commands,
    negotiated: &AtomicBool,
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
    let has_negotiated = negotiated.load(Ordering::Acquire);
    match name.as_str() {
        "qmp_capabilities" if has_negotiated => Err((
            "CommandNotFound",
            "Capabilities negotiation is already complete, command ignored".to_owned(),
        )),
        "qmp_capabilities" => {
            negotiated.store(true, Ordering::Release);
            Ok(json!({}))
        }
        _ if !has_negotiated => Err((
            "CommandNotFound",
            format!("Expecting capabilities negotiation with 'qmp_capabilities', found '{name}'"),
        )),
        "query-version" => Ok(version()),
        "query-commands" => {
            let own = ["qmp_capabilities", "query-version", "query-commands"];
            let names = own.iter().chain(commands.names());
            Ok(names.map(|name| json!({ "name": name })).collect())
        }
        name => commands.execute(name, &arguments).map_err(|refusal| match refusal {
            CommandError::NotFound => ("CommandNotFound", format!("The command {name} has not been found")),
            CommandError::Generic(text) => ("GenericError", text),
        }),
    }
}

impl ConnectedClient {
    /// Replies to requests, in order, until the client disconnects.
    fn read(&self, shared: &Shared) {
        self.post(Dialogue::greeting(Map::new()));
        let mut dialogue = Dialogue::new(REQUEST_BYTES_MAX);
        let mut bytes = [0; 4096];
        loop {
            match self.channel.recv(&mut [IoBufMut::from(&mut bytes[..])], RecvFlags::empty()) {
                Ok(0) | Err(_) => return,
                Ok(count) => dialogue.feed(&bytes[..count]),
            }
            loop {
                let _answering = lock(&self.answering);
                match dialogue.next_reply(shared.commands.as_ref(), &self.negotiated) {
                    Ok(None) => break,
                    Ok(Some(reply)) => self.post(reply),
                    Err(Unreadable(reply)) => return self.post(reply),
                }
            }
        }
    }

    fn write(&self, messages: &Receiver<String>) {
        let _ = self.channel.set_timeouts(None, Some(WRITE_TIMEOUT));
        // An empty message ends the thread.
        while let Some(text) = messages.recv().ok().filter(|text| !text.is_empty()) {
            if self.channel.send_all(&[IoBuf::from(text.as_bytes())], SendFlags::empty()).is_err() {
                break;
            }
        }
        let _ = self.channel.shutdown(Shutdown::Both);
    }

    fn post(&self, text: String) {
        if let Err(TrySendError::Full(_)) = self.outbox.try_send(text) {
            tracing::warn!("control socket: disconnecting a client that does not read");
            let _ = self.channel.shutdown(Shutdown::Both);
        }
    }

    /// Has the writer send what is queued, and close the connection.
    fn finish(&self) {
        if self.outbox.try_send(String::new()).is_err() {
            let _ = self.channel.shutdown(Shutdown::Both);
        }
    }
}

fn line(message: &Value) -> String {
    format!("{message}\r\n")
}

/// In the shape of `query-version`. The numbers are towline's own.
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
