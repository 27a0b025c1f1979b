//! This end of the session: starts ssh, and drives the agent.

use std::fmt;
use std::net::{IpAddr, Shutdown};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, ExitStatus};
use std::str::FromStr;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;
use towline_channel::{Address, OneTimeKey};
use towline_compat::Facts;
use towline_qmp::{self as qmp, Client, Event};

use super::disks::{DiskPolicy, DiskTokens};
use super::error::{Error, SSH_FAILED};
use super::frames::{FramePassing, GiveFrames};
use super::{
    DepartingGuest, Departure, ENDED, Ended, FRAMES, FRAMES_KEY, Fit, LISTENING, NOTICE, Place, Prepare,
    Receive, ReceiveDirect, SESSION, SESSION_KEY, SendImage, level,
};
use crate::hex::{from_hex, to_hex};
use crate::journal::milliseconds;
use crate::plan::{CopyRequest, HostFacts, Tls};
use crate::procfs::of_kernel;

/// Timeout for ssh to log in once it is connected, with whatever it asks its user for.
const GREETING_TIMEOUT: Duration = Duration::from_secs(120);
/// Timeout for a reply: longer than a QEMU may take to start, and to describe itself.
const REPLY_TIMEOUT: Duration = Duration::from_secs(100);
/// Signs of life that ssh misses before it takes the host for lost.
const MISSED_MAX: u32 = 4;
/// Time in which ssh ends once its input has; it is killed then. The agent ends a QEMU meanwhile.
const END_TIMEOUT: Duration = Duration::from_secs(6);
/// Interval of checks for that.
const END_INTERVAL: Duration = Duration::from_millis(5);
/// Longest name of a host, and of its kernel.
const NAME_MAX: usize = 255;
/// Events that are read while one is awaited.
const EVENTS_MAX: usize = 1000;
/// Exit statuses of a shell that finds no such program, and of a towline that does not know the command.
const NOT_FOUND: i32 = 127;
const USAGE: i32 = 2;

/// A host, as OpenSSH names it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SshTarget {
    /// `HOST` or `USER@HOST`: a name of the user's ssh configuration, or an address.
    destination: String,
    port: Option<u16>,
}

/// Timeouts of a session.
#[derive(Debug, Clone, Copy)]
pub struct SessionTimeouts {
    /// Time in which ssh connects.
    pub connect: Duration,
    /// Silence after which the host is taken for lost.
    pub peer: Duration,
}

/// The ssh of a session, which ends with this value.
#[derive(Debug)]
struct Ssh {
    child: Child,
    /// Its input and output.
    stream: UnixStream,
}

/// A session with the towline of another host, which ends with this value.
#[derive(Debug)]
pub struct RemoteHost {
    target: SshTarget,
    client: Client,
    ssh: Ssh,
    /// Address by which ssh has reached it.
    address: Option<IpAddr>,
    /// By its greeting, without a QEMU.
    facts: HostFacts,
}

/// Where another host receives a guest.
#[derive(Debug, Clone)]
pub struct Arrival {
    /// Where it listens.
    pub address: Address,
    /// Keys of both ends.
    pub tls: Tls,
    /// Where it receives the content of disks that are copied.
    pub disks: Option<Address>,
    /// True if it connects again to a host that it has lost after a switch to postcopy.
    pub recovers: bool,
}

impl FromStr for SshTarget {
    type Err = String;

    /// Parses `[USER@]HOST[:PORT]`; an IPv6 address with a port is in brackets.
    fn from_str(text: &str) -> Result<Self, String> {
        let (destination, port) = match text.rsplit_once(':') {
            Some((host, port)) if !host.contains(':') || host.ends_with(']') => {
                let port = port.parse().map_err(|_| format!("port {port:?} of {text} is not a number"))?;
                (host, Some(port))
            }
            _ => (text, None),
        };
        let (user, host) = destination.rsplit_once('@').unwrap_or(("", destination));
        let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
        // Not an option, neither of ssh nor of what it starts.
        if host.is_empty()
            || destination.starts_with('-')
            || host.starts_with('-')
            || destination.contains(char::is_whitespace)
        {
            return Err(format!("{text:?} is not a host: expected [USER@]HOST[:PORT]"));
        }
        let destination = if user.is_empty() { host.to_owned() } else { format!("{user}@{host}") };
        Ok(Self { destination, port })
    }
}

impl fmt::Display for SshTarget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.port {
            Some(port) if self.host().contains(':') => {
                let user = self.destination.strip_suffix(self.host()).unwrap_or_default();
                write!(f, "{user}[{}]:{port}", self.host())
            }
            Some(port) => write!(f, "{}:{port}", self.destination),
            None => f.write_str(&self.destination),
        }
    }
}

impl SshTarget {
    fn host(&self) -> &str {
        self.destination.rsplit_once('@').map_or(&self.destination, |(_, host)| host)
    }

    /// The command that starts the agent there; `ssh` is OpenSSH's client with its options.
    fn command(&self, ssh: &str, timeouts: SessionTimeouts) -> Command {
        let mut words = ssh.split_whitespace();
        let mut command = Command::new(words.next().unwrap_or("ssh"));
        command.args(words).arg("-T");
        let SessionTimeouts { connect, peer } = timeouts;
        // Seconds, with 0 for none.
        for (option, value) in [
            ("ConnectTimeout", connect.as_secs().max(1)),
            ("ServerAliveInterval", peer.div_f64(f64::from(MISSED_MAX)).as_secs().max(1)),
            ("ServerAliveCountMax", u64::from(MISSED_MAX)),
        ] {
            command.arg("-o").arg(format!("{option}={value}"));
        }
        command.args(self.port.into_iter().flat_map(|port| ["-p".to_owned(), port.to_string()]));
        command.args(["--", &self.destination, "towline", "agent"]);
        command
    }
}

impl RemoteHost {
    /// Starts the agent of a host by this command of ssh. `interrupt` ends every wait.
    ///
    /// # Errors
    /// [`Error`]; ssh prints its own messages.
    pub fn connect(
        target: &SshTarget,
        ssh: &str,
        timeouts: SessionTimeouts,
        interrupt: Option<Arc<OwnedFd>>,
    ) -> Result<Self, Error> {
        let mut command = target.command(ssh, timeouts);
        let program = command.get_program().to_string_lossy().into_owned();
        let mut start = || {
            let (here, there) = UnixStream::pair()?;
            let input: OwnedFd = there.try_clone()?.into();
            command.stdin(input).stdout(OwnedFd::from(there));
            let stream = here.try_clone()?;
            Ok((here, Ssh { child: command.spawn()?, stream }))
        };
        let (stream, mut ssh) = start().map_err(|source| Error::Start { program, source })?;
        let options = qmp::Options {
            deadline: REPLY_TIMEOUT,
            greeting_deadline: GREETING_TIMEOUT,
            interrupt,
            ..qmp::Options::default()
        };
        // The command has the other end of the pair, too.
        drop(command);
        let client = match Client::from_stream(stream, target.to_string(), &options) {
            Ok(client) => client,
            Err(error) => return Err(reason_of_end(target, &mut ssh, &error)),
        };
        let greeting = &client.greeting().other;
        let found = greeting.get(SESSION_KEY).and_then(|session| session["session"].as_u64());
        let host = || target.to_string();
        match found {
            Some(SESSION) => {}
            Some(found) => return Err(Error::Session { host: host(), found, expected: SESSION }),
            None => {
                return Err(Error::Unexpected {
                    host: host(),
                    found: "another greeting".into(),
                    expected: "that of an agent",
                });
            }
        }
        let address = greeting[SESSION_KEY]["address"].as_str().and_then(|text| text.parse().ok());
        let name = |key: &str| -> String {
            let text = greeting[SESSION_KEY][key].as_str().unwrap_or_default();
            text.chars().take(NAME_MAX).collect()
        };
        let facts = HostFacts { name: name("host"), kernel: name("kernel"), qemu: None };
        Ok(Self { target: target.clone(), client, ssh, address, facts })
    }

    /// The host, as its user named it.
    pub fn name(&self) -> String {
        self.target.to_string()
    }

    /// Source and destination of a guest that goes there.
    pub fn hosts_of(&self, guest: &DepartingGuest, fit: &Fit) -> [HostFacts; 2] {
        let version = |facts: &Facts| facts.qemu().map(|qemu| qemu.version.clone());
        let there = fit.facts.as_ref().and_then(version);
        [own_facts(version(&guest.facts)), HostFacts { qemu: there, ..self.facts.clone() }]
    }

    /// Source and destination of an image that comes from there.
    pub fn hosts_of_image(&self) -> [HostFacts; 2] {
        [self.facts.clone(), own_facts(None)]
    }

    /// The process of its ssh.
    pub fn ssh_pid(&self) -> u32 {
        self.ssh.child.id()
    }

    /// Has it make the place of this guest, and judge that.
    ///
    /// # Errors
    /// [`Error`]: the place cannot be made.
    pub fn prepare(&mut self, guest: &DepartingGuest, lanes: usize) -> Result<Fit, Error> {
        let has_disks = matches!(guest.place, Place::Qmp(_) | Place::Guest(_));
        let policy = if has_disks { guest.disk_policy } else { DiskPolicy::VouchedFor };
        let needs_tokens = policy != DiskPolicy::VouchedFor;
        // Until the other host has seen them.
        let tokens = DiskTokens::make(if needs_tokens { &guest.disks } else { &[] });
        let disks = tokens.to_judge(&guest.disks, policy);
        let prepared =
            self.execute(&Prepare { place: guest.place.clone(), facts: guest.facts_json(), lanes, disks })?;
        let facts = self.parse_facts(prepared.facts, "facts about its QEMU")?;
        let takes_frames = self.client.greeting().other[SESSION_KEY][FRAMES_KEY] == FRAMES;
        let cards = if takes_frames { prepared.cards } else { Vec::new() };
        Ok(Fit { facts, refusals: prepared.refusals, cards })
    }

    /// Has it listen for this guest, for which it has made a place.
    ///
    /// # Errors
    /// [`Error`].
    pub fn receive(
        &mut self,
        guest: &DepartingGuest,
        request: &CopyRequest,
        lanes: usize,
    ) -> Result<Arrival, Error> {
        let key = OneTimeKey::generate()?;
        let receiving = self.execute(&Receive {
            certificate: to_hex(key.certificate()),
            lanes,
            compression: request.compression.method().name().to_owned(),
            compression_level: level(request.compression),
            run: request.run(),
            overwrite: request.overwrite,
            peer_timeout_ms: milliseconds(request.peer_timeout),
            direct: request.direct.as_ref().map(|direct| ReceiveDirect {
                is_encrypted: direct.is_encrypted,
                capabilities: direct.capabilities.clone(),
                recover_timeout_ms: milliseconds(request.recover_timeout),
            }),
        })?;
        if request.direct.is_some() && !receiving.is_direct {
            return Err(Error::NotDirect { host: self.name() });
        }
        // Else the guest would run on empty disks.
        if guest.copies_disks() && receiving.disk_port.is_none() {
            return Err(Error::NoDiskPort { host: self.name() });
        }
        let tls = self.tls(key, &receiving.certificate)?;
        let address = self.await_listening()?;
        let disks = receiving.disk_port.map(|port| self.at(port));
        Ok(Arrival { address, tls, disks, recovers: receiving.recovers })
    }

    /// Has it send the image at this place by this request, once this end connects to it.
    ///
    /// # Errors
    /// [`Error`]: also if there is no such image.
    pub fn send(&mut self, place: &Place, request: &CopyRequest, lanes: usize) -> Result<Departure, Error> {
        let key = OneTimeKey::generate()?;
        let sending = self.execute(&SendImage {
            place: place.clone(),
            certificate: to_hex(key.certificate()),
            lanes,
            compression: request.compression.method().name().to_owned(),
            compression_level: level(request.compression),
            max_bandwidth: request.transfer_options().max_bandwidth,
            verify: request.verify,
            peer_timeout_ms: milliseconds(request.peer_timeout),
        })?;
        let tls = self.tls(key, &sending.certificate)?;
        let facts = self.parse_facts(sending.facts, "facts about its image")?;
        let address = self.await_listening()?;
        Ok(Departure { address, tls, facts })
    }

    /// Keys of both ends, with the certificate that it has sent in hexadecimal digits.
    fn tls(&self, key: OneTimeKey, certificate: &str) -> Result<Tls, Error> {
        let peer = from_hex(certificate);
        let peer = peer.ok_or_else(|| self.unexpected(certificate.to_owned(), "a certificate"))?;
        Ok(Tls::OneTime(key.with_peer(peer)))
    }

    /// Facts that it has sent.
    fn parse_facts(&self, sent: Option<Value>, expected: &'static str) -> Result<Option<Facts>, Error> {
        let facts = sent.map(|facts| Facts::parse(facts.to_string().as_bytes())).transpose();
        facts.map_err(|error| self.unexpected(error.to_string(), expected))
    }

    /// Waits until it listens for the stream. Returns where.
    pub(super) fn await_listening(&mut self) -> Result<Address, Error> {
        let event = self.await_event(&[LISTENING, ENDED], REPLY_TIMEOUT, &|_| {});
        let event = event.map_err(|error| self.failed(error))?;
        let event = event.ok_or_else(|| self.unexpected("nothing".into(), "the port that it listens on"))?;
        if event.name == ENDED {
            let ended: Option<Ended> = serde_json::from_value(event.data.into()).ok();
            let text = ended.and_then(|ended| ended.error).unwrap_or_else(|| "it has ended".into());
            return Err(Error::Refused { host: self.name(), text });
        }
        let port = event.data.get("port").and_then(|port| u16::try_from(port.as_u64()?).ok());
        let port = port.ok_or_else(|| self.unexpected(format!("{:?}", event.data), "a port"))?;
        Ok(self.at(port))
    }

    /// A port of that host.
    fn at(&self, port: u16) -> Address {
        let host = self.address.map_or_else(|| self.target.host().to_owned(), |address| address.to_string());
        Address::Tcp { host, port }
    }

    /// Has the agent cancel what it does.
    pub fn cancel(&self) {
        // A session that has ended is cancelled already.
        let _ = self.ssh.stream.shutdown(Shutdown::Write);
    }

    /// Waits for the end of the agent's part, for this time at most; `None`: it has not reported that. Its notices go to `notice`.
    pub fn await_end(mut self, within: Duration, notice: &dyn Fn(&str)) -> Option<Ended> {
        self.client.set_interrupt(None);
        let event = self.await_event(&[ENDED], within, notice).ok()??;
        serde_json::from_value(event.data.into()).ok()
    }

    /// Waits for the first of these events.
    fn await_event(
        &mut self,
        names: &[&str],
        within: Duration,
        notice: &dyn Fn(&str),
    ) -> Result<Option<Event>, qmp::Error> {
        let deadline = Instant::now() + within;
        for _ in 0..EVENTS_MAX {
            let left = deadline.saturating_duration_since(Instant::now());
            let Some(event) = self.client.next_event(left)? else { return Ok(None) };
            if names.contains(&event.name.as_str()) {
                return Ok(Some(event));
            }
            if let (NOTICE, Some(text)) =
                (event.name.as_str(), event.data.get("text").and_then(Value::as_str))
            {
                notice(text);
            }
        }
        Ok(None)
    }

    /// Moves a guest by `work`, and passes frames for it on meanwhile. `has_arrived` tells whether it is there.
    pub fn pass_frames<T>(
        &mut self,
        frames: &mut FramePassing,
        work: impl FnOnce() -> T,
        has_arrived: impl FnOnce(&T) -> bool,
    ) -> T {
        if frames.is_empty() {
            return work();
        }
        let give = |request: &GiveFrames, within| {
            // A cancelled move has its own end.
            self.set_patience(within);
            self.execute(request)
        };
        let result = frames.during(give, work, has_arrived);
        self.client.set_deadline(REPLY_TIMEOUT);
        result
    }

    /// Has the session wait for each reply for this time.
    pub(super) fn set_patience(&mut self, deadline: Duration) {
        self.client.set_interrupt(None);
        self.client.set_deadline(deadline);
    }

    pub(super) fn execute<C: qmp::Command>(&mut self, command: &C) -> Result<C::Return, Error> {
        self.client.execute(command).map_err(|error| self.failed(error))
    }

    fn failed(&mut self, error: qmp::Error) -> Error {
        match error {
            qmp::Error::Refusal { desc, .. } => Error::Refused { host: self.name(), text: desc },
            error => reason_of_end(&self.target, &mut self.ssh, &error),
        }
    }

    fn unexpected(&self, found: String, expected: &'static str) -> Error {
        Error::Unexpected { host: self.name(), found, expected }
    }
}

/// This host, with a QEMU of this version.
fn own_facts(qemu: Option<String>) -> HostFacts {
    HostFacts { name: of_kernel("hostname"), kernel: of_kernel("osrelease"), qemu }
}

impl Ssh {
    /// Ends its input, waits until it ends, and kills it if it does not. `None`: it is not known how it ended.
    fn end(&mut self) -> Option<ExitStatus> {
        let _ = self.stream.shutdown(Shutdown::Both);
        let deadline = Instant::now() + END_TIMEOUT;
        loop {
            match self.child.try_wait() {
                Ok(Some(status)) => return Some(status),
                Ok(None) if Instant::now() < deadline => thread::sleep(END_INTERVAL),
                Ok(None) | Err(_) => break,
            }
        }
        // A process that landlock confines cannot kill it: it ends once the host is silent.
        if self.child.kill().is_ok() {
            let _ = self.child.wait();
        }
        None
    }
}

impl Drop for Ssh {
    fn drop(&mut self) {
        self.end();
    }
}

/// The reason for which a session ended, by the exit status of its ssh.
fn reason_of_end(target: &SshTarget, ssh: &mut Ssh, error: &qmp::Error) -> Error {
    let host = target.to_string();
    let found = match error {
        qmp::Error::Cancelled { .. } => return Error::Cancelled,
        qmp::Error::NoGreeting { waited, .. } | qmp::Error::Timeout { waited, .. } => {
            return Error::Silent { host, waited: *waited };
        }
        qmp::Error::NotQmp { found, .. } => Some(found.clone()),
        _ => None,
    };
    let status = ssh.end();
    match (status.and_then(|status| status.code()), status, found) {
        (Some(SSH_FAILED), ..) => Error::Unreachable { host },
        (Some(NOT_FOUND), ..) => Error::NoTowline { host },
        (Some(USAGE), ..) => Error::Older { host },
        (_, _, Some(found)) => Error::Chatty { host, found },
        (_, Some(status), None) if !status.success() => Error::AgentEnded { host, status },
        _ => Error::Lost { host },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_are_named_as_for_ssh() {
        for (text, destination, port) in [
            ("b", "b", None),
            ("root@b:2222", "root@b", Some(2222)),
            ("[::1]:22", "::1", Some(22)),
            ("u@[::1]:22", "u@::1", Some(22)),
            ("u@[fe80::1]", "u@fe80::1", None),
            ("::1", "::1", None),
        ] {
            let target: SshTarget = text.parse().unwrap();
            assert_eq!((target.destination.as_str(), target.port), (destination, port), "{text}");
            assert_eq!(target.to_string().parse(), Ok(target), "{text}");
        }
        for text in ["", "u@", "-oProxyCommand=x", "u@-x", "a b", "b:x"] {
            assert!(text.parse::<SshTarget>().is_err(), "{text}");
        }
        let target: SshTarget = "root@b:2222".parse().unwrap();
        let command = target.command(
            "ssh -F config",
            SessionTimeouts { connect: Duration::from_millis(10_500), peer: Duration::from_secs(30) },
        );
        let words: Vec<_> = command.get_args().map(|word| word.to_string_lossy()).collect();
        assert_eq!(words[..3], ["-F", "config", "-T"]);
        assert_eq!(words[4..8], ["ConnectTimeout=10", "-o", "ServerAliveInterval=7", "-o"]);
        assert_eq!(words[9..], ["-p", "2222", "--", "root@b", "towline", "agent"]);
    }
}
