//! Sockets in the command line of the new QEMU, and the processes at their other ends.

use std::path::Path;
use std::time::{Duration, Instant};

use towline_channel::{Address, Cancel, ChannelExt as _, IoBuf, IoBufMut, SendFlags};
use towline_launch::QemuVersion;
use towline_launch::command_line::{Conflict, Properties, QemuOption};

use super::super::error::Error;
use super::{
    Cards, DESCRIPTOR_REASON, LAUNCHERS_MONITOR, OldQemuFacts, Rewriter, SharedCard, Vsocks, reason,
};
use crate::qemu;
use crate::temporary_names::StagingName;

/// Longest path of a Unix socket.
const SOCKET_PATH_BYTES_MAX: usize = 107;
/// Properties of chardevs: seconds, which QEMU 11 has no longer, and milliseconds.
const RECONNECT: &str = "reconnect";
const RECONNECT_MS: &str = "reconnect-ms";
/// First version with [`RECONNECT_MS`].
const RECONNECT_MS_SINCE: QemuVersion = QemuVersion { major: 9, minor: 2 };
/// Prefix of ids of chardevs that are made here.
const PORT_ID: &str = "towline-port";
/// A chardev with the words of a port that is a Unix socket.
const UNIX_SOCKET: &str = "socket,path=";
const CLIENT_REASON: &str = "it is connected to another process, which may not accept a second connection; set one that listens (server=on)";
const CARD_LISTENS_REASON: &str = "QEMU does not connect to this card by a path, so that the new one cannot connect as well; unplug the card before";
/// Time limit of the reply. A process that serves one frontend at a time does not accept a second one until
/// then.
const REPLY_WITHIN: Duration = Duration::from_secs(2);
/// `VHOST_USER_GET_FEATURES`, of version 1, without a payload: the first request of QEMU, which changes
/// nothing.
const GET_FEATURES: [u32; 3] = [1, 1, 0];
/// Header and features.
const REPLY_BYTES: usize = 12 + 8;

impl Rewriter<'_> {
    pub(super) fn socket(
        &mut self,
        changed: QemuOption,
        properties: &Properties,
        key: &str,
    ) -> Option<QemuOption> {
        let value = |name: &str| properties.value(name);
        let id = value("id").unwrap_or_default();
        if value("fd").is_some() {
            let is_launchers = id == LAUNCHERS_MONITOR;
            return if is_launchers { None } else { self.refuse(key, &id, DESCRIPTOR_REASON) };
        }
        if self.card_chardevs.contains(&id) {
            return self.card(changed, properties, key);
        }
        if properties.is_on("abstract") {
            return self.refuse(key, &id, reason(Conflict::Port));
        }
        match value("path") {
            Some(_) if properties.is_on("server") => self.listening(changed, key),
            Some(_) if self.vsock_chardevs.contains(&id) => match self.context.vsocks {
                Vsocks::Detached => Some(changed),
                // Its device is refused.
                Vsocks::Refused => None,
            },
            Some(path) => self.refuse(key, &path, CLIENT_REASON),
            None => self.refuse(key, &value("port").unwrap_or_default(), reason(Conflict::Port)),
        }
    }

    /// The connection to a card.
    fn card(&mut self, option: QemuOption, properties: &Properties, key: &str) -> Option<QemuOption> {
        if self.context.cards == Cards::Refused {
            // Its network is refused.
            return None;
        }
        let is_plain = |name| !properties.is_on(name);
        match properties.value("path").filter(|_| is_plain("server") && is_plain("abstract")) {
            Some(path) if self.has_known_path(&path, key) => {
                let chardev = properties.value("id").unwrap_or_default();
                let socket = self.context.working_directory.join(path);
                self.rewritten.cards.push(SharedCard { chardev, socket });
                Some(option)
            }
            Some(_) => None,
            None => self.refuse(key, &properties.value("path").unwrap_or_default(), CARD_LISTENS_REASON),
        }
    }

    /// Has a socket listen at its staging name, without waiting for a client.
    fn listening(&mut self, mut socket: QemuOption, key: &str) -> Option<QemuOption> {
        let path = socket.property("path")?;
        let staged = self.staged(&path, key)?;
        let properties = socket.properties_mut()?;
        properties.set("path", &staged);
        properties.remove("nowait");
        properties.set_switch("wait", false);
        if properties.value("logfile").is_some() {
            properties.set_switch("logappend", true);
        }
        Some(socket)
    }

    /// The other end of a port or monitor (`qemu_chr_parse_compat` of QEMU's `chardev/char.c`).
    pub(super) fn port(&mut self, option: &QemuOption, text: &str, key: &str) -> Option<QemuOption> {
        let (prefix, end) = text.strip_prefix("mon:").map_or(("", text), |end| ("mon:", end));
        let (kind, value) = end.split_once(':').unwrap_or((end, ""));
        let conflict = match kind {
            "none" | "null" | "chardev" | "vc" => return Some(option.clone()),
            "stdio" | "pty" | "msmouse" => Conflict::Terminal,
            "tcp" | "telnet" | "tn3270" | "websocket" | "udp" => Conflict::Port,
            "file" if prefix.is_empty() && !value.is_empty() => return self.port_file(option, value, key),
            // An escaped comma is one of the path.
            "unix" if !value.contains(",,") => {
                let socket = super::option("chardev", &format!("{UNIX_SOCKET}{value}"))?;
                let properties = socket.properties()?;
                match (properties.is_on("server"), properties.is_on("abstract")) {
                    (true, true) => Conflict::Port,
                    (true, false) => {
                        let socket = self.listening(socket, key)?.value_text()?;
                        let words = socket.strip_prefix(UNIX_SOCKET)?;
                        return super::option(option.name.as_str(), &format!("{prefix}unix:{words}"));
                    }
                    (false, _) => return self.refuse(key, text, CLIENT_REASON),
                }
            }
            _ => Conflict::Unknown,
        };
        self.refuse(key, text, reason(conflict))
    }

    /// A port that writes to a file: by a chardev, which can append to it.
    fn port_file(&mut self, option: &QemuOption, path: &str, key: &str) -> Option<QemuOption> {
        if !self.has_known_path(path, key) {
            return None;
        }
        let id = format!("{PORT_ID}{}-{}", self.context.number, self.added.len());
        let path = path.replace(',', ",,");
        self.added.extend(super::option("chardev", &format!("file,id={id},path={path},append=on")));
        super::option(option.name.as_str(), &format!("chardev:{id}"))
    }

    /// The staging name of a path, as QEMU gets it.
    pub(super) fn staged(&mut self, path: &str, key: &str) -> Option<String> {
        if !self.has_known_path(path, key) {
            return None;
        }
        let target = self.context.working_directory.join(path);
        let name = StagingName::new(&target, self.context.number);
        let staged = name.path.to_str().map(str::to_owned);
        let Some(staged) = staged.filter(|staged| !staged.contains([',', '='])) else {
            self.refuse(key, path, "its path has a comma or a '='; set another path");
            return None;
        };
        if staged.len() > SOCKET_PATH_BYTES_MAX {
            let reason = format!(
                "{staged}, its name for the time of the upgrade, has {} bytes, expected at most {SOCKET_PATH_BYTES_MAX}; set a shorter \
                 path",
                staged.len()
            );
            self.refuse(key, path, &reason);
            return None;
        }
        self.rewritten.names.push(name);
        Some(staged)
    }
}

impl OldQemuFacts<'_> {
    /// Sets the time until a chardev connects again by the property that this version of QEMU has.
    pub(super) fn set_reconnect(&self, chardev: &mut Properties) {
        let value = |name| chardev.value(name).and_then(|value| value.parse::<u64>().ok());
        let (former, name, time) = if self.version >= RECONNECT_MS_SINCE {
            let milliseconds = value(RECONNECT).and_then(|seconds| seconds.checked_mul(1000));
            (RECONNECT, RECONNECT_MS, milliseconds)
        } else {
            let seconds = value(RECONNECT_MS).map(|milliseconds| milliseconds.div_ceil(1000));
            (RECONNECT_MS, RECONNECT, seconds)
        };
        if let Some(time) = time {
            chardev.remove(former);
            chardev.set(name, &time.to_string());
        }
    }
}

/// Checks that the process at this socket replies to a frontend beside the one that it has.
///
/// # Errors
/// [`Error::OneFrontend`].
pub(in super::super) fn check_second_frontend(socket: &Path, cancel: &Cancel) -> Result<(), Error> {
    request_features(socket, cancel).map_err(|source| match source {
        towline_channel::Error::Cancelled => {
            qemu::Error::from(towline_qmp::Error::Cancelled { socket: socket.display().to_string() }).into()
        }
        source => Error::OneFrontend { path: socket.to_owned(), source: source.into() },
    })
}

fn request_features(socket: &Path, cancel: &Cancel) -> towline_channel::Result<()> {
    // Its queue may be full of connections that it has not accepted.
    let address = Address::Unix(socket.to_owned());
    let channel = towline_channel::connect(&address, Instant::now() + REPLY_WITHIN, cancel)?;
    channel.set_timeouts(Some(REPLY_WITHIN), Some(REPLY_WITHIN))?;
    let request: Vec<u8> = GET_FEATURES.iter().flat_map(|word| word.to_ne_bytes()).collect();
    channel.send_all(&[IoBuf::from(&request[..])], SendFlags::empty())?;
    channel.recv_exact(&mut [IoBufMut::from(&mut [0; REPLY_BYTES][..])])
}

#[cfg(test)]
mod tests {
    use std::io::{ErrorKind, Read as _, Write as _};
    use std::os::unix::net::UnixListener;

    use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

    use super::*;

    #[test]
    fn a_process_that_does_not_reply_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("net.sock");
        let check = || check_second_frontend(&path, &Cancel::new().unwrap());
        let source = |found: Result<(), Error>| match found {
            Err(Error::OneFrontend { source, .. }) => source,
            other => panic!("{other:?}"),
        };
        let missing = source(check());
        assert!(
            matches!(&*missing, towline_channel::Error::Io { source, .. } if source.kind() == ErrorKind::NotFound),
            "{missing}"
        );
        let listener = UnixListener::bind(&path).unwrap();
        let silent = source(check());
        assert!(matches!(*silent, towline_channel::Error::Timeout { .. }), "{silent}");
        let server = std::thread::spawn(move || {
            // The error of the previous attempt.
            drop(listener.accept().unwrap());
            let (mut stream, _) = listener.accept().unwrap();
            let mut request = [0; 12];
            stream.read_exact(&mut request).unwrap();
            assert_eq!(request[..4], 1_u32.to_ne_bytes());
            stream.write_all(&[0; REPLY_BYTES]).unwrap();
        });
        check().unwrap();
        server.join().unwrap();
    }

    /// As of a process with one frontend, after some attempts.
    #[test]
    fn a_full_queue_is_not_waited_for_without_end() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("net.sock");
        let address = SocketAddrUnix::new(&path).unwrap();
        let flags = SocketFlags::NONBLOCK;
        let socket =
            || rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).unwrap();
        let listener = socket();
        rustix::net::bind(&listener, &address).unwrap();
        rustix::net::listen(&listener, 0).unwrap();
        while rustix::net::connect(socket(), &address).is_ok() {}
        let error = check_second_frontend(&path, &Cancel::new().unwrap()).unwrap_err();
        assert!(error.to_string().contains("does not reply to a second QEMU"), "{error}");
    }
}
