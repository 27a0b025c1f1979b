//! The command line of the new QEMU: that of the old one, except for what both cannot have at a time.
//!
//! ```text
//!   sockets it listens on, pidfile ─► staging names (`temporary_names`), never waiting for a client
//!   files it writes its consoles to ─► appended to, not truncated
//!   -incoming, -S, -daemonize, the launcher's own monitor, -run-with exit-with-parent ─► left out
//!   machine type ─► the versioned one; vmgenid ─► the value that the guest has
//!   reconnect of a chardev ─► reconnect-ms, or back, as the new QEMU has it
//!   ports, taps, host devices, other processes' sockets, what is not listed ─► refused, with its setting
//! ```
//! What becomes of each option is in `towline_launch`'s table of them. Here is how, and why some are refused.
//! An option that a setting of the user replaces is the user's: it is neither changed nor refused. One of
//! which a setting changes a property is changed like any other, except for that property, and is not refused.

mod sockets;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use towline_launch::command_line::{Conflict, OptionName, OptionValue, Properties, QemuOption, Rewrite};
use towline_launch::{CommandLine, QemuVersion, Setting};

use super::error::IncompatibleSetting;
use crate::temporary_names::StagingName;

pub(super) use sockets::check_second_frontend;

/// Id of the monitor that the launcher gives each QEMU.
const LAUNCHERS_MONITOR: &str = "towline-qmp";
/// Property of `-run-with`, of QEMU 10.2 and later.
const EXIT_WITH_PARENT: &str = "exit-with-parent";
/// Properties that name a file of a drive or node.
const FILE_PROPERTIES: [&str; 3] = ["file", "filename", "file.filename"];
const DESCRIPTOR_REASON: &str = "it is a descriptor of the old QEMU; set a path";
const DAEMON_REASON: &str = "it is relative to the directory in which the old QEMU was started, which a daemon leaves; set an absolute path";
const CARD_REASON: &str = "its card is in another process; have a `towline net` serve both QEMUs with --with-devices, or unplug the card before";
const SNAPSHOT_REASON: &str = "what the guest wrote to it is in a temporary file of the old QEMU";
const MODEL_REASON: &str =
    "this device model is not known; unplug it before, or set it to the value for the new QEMU";
const VSOCK_REASON: &str = "QEMU does not migrate it; detach it with --detach-vsock";

/// The reason of a refusal, and what to do.
fn reason(conflict: Conflict) -> &'static str {
    match conflict {
        Conflict::Port => "the old QEMU listens there until the guest has left it; set another address",
        Conflict::Terminal => {
            "the terminal is the old QEMU's; set a socket or a file (unix:/run/NAME,server=on,wait=off)"
        }
        Conflict::Display => "the old QEMU has this display; set another, or none",
        Conflict::Tap => {
            "a tap has one QEMU at a time; give the guest a card of `towline net`, or set another tap and connect it to the same bridge"
        }
        Conflict::HostDevice => {
            "it is a device of the host or of another process, which has one QEMU at a time; unplug it before"
        }
        Conflict::TemporaryFiles => "what the guest wrote to its disks is in temporary files of the old QEMU",
        Conflict::TraceFile => {
            "the old QEMU writes this file, and the new one would truncate it; set another"
        }
        Conflict::Recording => {
            "QEMU that records or replays a guest ends when it is asked to move it; end the recording first"
        }
        Conflict::Unknown => {
            "it is not known whether two QEMUs can have it; set it to the value for the new one, or remove it with an empty value"
        }
    }
}

/// Facts of the old QEMU that its command line does not have.
#[derive(Debug)]
pub(super) struct OldQemuFacts<'a> {
    pub(super) working_directory: &'a Path,
    /// Version of the new QEMU.
    pub(super) version: QemuVersion,
    /// Machine type, with its version.
    pub(super) machine: &'a str,
    /// The guest's vmgenid.
    pub(super) generation_id: Option<&'a str>,
    pub(super) settings: &'a [Setting],
    /// Devices that are attached once the guest is in the new QEMU.
    pub(super) vsocks: Vsocks,
    /// Chardevs of vsocks that were plugged in since its start.
    pub(super) vsock_chardevs: &'a [String],
    /// Devices whose process serves both QEMUs.
    pub(super) cards: Cards,
    /// Number of this upgrade, in the staging names.
    pub(super) number: u32,
}

/// Treatment of vhost-user-vsock devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Vsocks {
    /// They are refused, as QEMU does not migrate them.
    Refused,
    /// They are detached, and attached again in the new QEMU.
    Detached,
}

/// Treatment of vhost-user network cards.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cards {
    /// Refused.
    Refused,
    /// The new QEMU connects to each process while the old one is connected.
    Shared,
}

/// A network card whose process serves both QEMUs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct SharedCard {
    /// The chardev by which QEMU is connected to it.
    pub(super) chardev: String,
    /// The process's socket.
    pub(super) socket: PathBuf,
}

/// See the module's text.
#[derive(Debug, Default)]
pub(super) struct Rewritten {
    pub(super) command_line: CommandLine,
    /// The value of `-name`, which the launcher's own precedes.
    pub(super) name: Option<String>,
    pub(super) names: Vec<StagingName>,
    /// Cards whose processes serve both QEMUs.
    pub(super) cards: Vec<SharedCard>,
}

/// Rewrites the command line of the old QEMU.
///
/// # Errors
/// All options that are refused.
pub(super) fn rewrite(
    old: &CommandLine,
    context: &OldQemuFacts<'_>,
) -> Result<Rewritten, Vec<IncompatibleSetting>> {
    let mut vsock_chardevs = chardevs(old, Rewrite::Vsock);
    vsock_chardevs.extend(context.vsock_chardevs.iter().cloned());
    let keys = old.setting_keys();
    let mut rewriter = Rewriter {
        context,
        vsock_chardevs,
        card_chardevs: chardevs(old, Rewrite::Card),
        is_daemon: old.named("daemonize").next().is_some(),
        keys: keys.clone(),
        rewritten: Rewritten::default(),
        added: Vec::new(),
        refusals: Vec::new(),
    };
    for (option, key) in old.options().iter().zip(keys) {
        if option.rewrite() == Rewrite::Name {
            rewriter.rewritten.name = option.value_text();
        } else if let Some(option) = rewriter.option(option, &key) {
            rewriter.rewritten.command_line.options_mut().push(option);
        }
    }
    let Rewriter { mut rewritten, mut added, refusals, .. } = rewriter;
    rewritten.command_line.options_mut().append(&mut added);
    set_machine(&mut rewritten.command_line, context.machine);
    let chardevs =
        rewritten.command_line.options_mut().iter_mut().filter(|option| option.name.as_str() == "chardev");
    chardevs.filter_map(QemuOption::properties_mut).for_each(|chardev| context.set_reconnect(chardev));
    if refusals.is_empty() { Ok(rewritten) } else { Err(refusals) }
}

/// Replaces an alias by the machine type that the guest has.
fn set_machine(command_line: &mut CommandLine, machine: &str) {
    let is_machine = |option: &&mut QemuOption| option.name.as_str() == "machine";
    let last = command_line.options_mut().iter_mut().rfind(is_machine);
    if let Some(properties) = last.and_then(QemuOption::properties_mut) {
        properties.set("type", machine);
        return;
    }
    command_line.options_mut().extend(option("machine", machine));
}

/// Chardevs of devices and network backends that are rewritten so.
fn chardevs(command_line: &CommandLine, rewrite: Rewrite) -> BTreeSet<String> {
    let options = command_line.named("device").chain(command_line.named("netdev"));
    let options = options.filter(|option| option.rewrite() == rewrite);
    options.filter_map(|option| option.property("chardev")).collect()
}

fn option(name: &str, value: &str) -> Option<QemuOption> {
    QemuOption::parse(OptionName::find(name)?, Some(value)).ok()
}

/// The refusal of a QEMU that would end with towline, as options or arguments of the user request it.
pub(super) fn refuse_end_with_parent(arguments: &CommandLine) -> Option<IncompatibleSetting> {
    let mut properties = arguments.named("run-with").filter_map(QemuOption::properties);
    let found = properties.find(|properties| properties.is_on(EXIT_WITH_PARENT))?;
    Some(IncompatibleSetting {
        setting: format!("run-with.{EXIT_WITH_PARENT}"),
        found: found.value(EXIT_WITH_PARENT).unwrap_or_default(),
        reason: "the new QEMU would end with towline, and the guest with it; leave it out".into(),
    })
}

struct Rewriter<'a> {
    context: &'a OldQemuFacts<'a>,
    vsock_chardevs: BTreeSet<String>,
    card_chardevs: BTreeSet<String>,
    /// It has left the directory to which its relative paths belong.
    is_daemon: bool,
    /// Keys of the settings of all options.
    keys: Vec<String>,
    rewritten: Rewritten,
    added: Vec<QemuOption>,
    refusals: Vec<IncompatibleSetting>,
}

impl Rewriter<'_> {
    fn option(&mut self, option: &QemuOption, key: &str) -> Option<QemuOption> {
        if option.rewrite() == Rewrite::Drop {
            return None;
        }
        if self.is_set_by_user(key) {
            return Some(option.clone());
        }
        if !self.has_property_set(key) {
            return self.rewrite(option, key);
        }
        // The user's value follows. The rest of the option is changed like any other, unless that would be
        // refused.
        let (refusals, added) = (self.refusals.len(), self.added.len());
        let names = self.rewritten.names.len();
        let rewritten = self.rewrite(option, key);
        if self.is_set_by_user(&format!("{key}.path")) {
            self.rewritten.names.truncate(names);
        }
        if rewritten.is_some() {
            return rewritten;
        }
        self.refusals.truncate(refusals);
        self.rewritten.names.truncate(names);
        self.added.truncate(added);
        Some(option.clone())
    }

    fn rewrite(&mut self, option: &QemuOption, key: &str) -> Option<QemuOption> {
        let text = option.value_text().unwrap_or_default();
        if text.contains("/dev/fdset/") {
            return self.refuse(key, &text, DESCRIPTOR_REASON);
        }
        let kind = option.type_name().unwrap_or(text);
        let mut changed = option.clone();
        if let Some(log) = option.property("logfile") {
            // QEMU would truncate it at its start.
            changed.properties_mut()?.set_switch("logappend", true);
            if !self.has_known_path(&log, key) {
                return None;
            }
        }
        match (option.rewrite(), &option.value) {
            (Rewrite::Keep, _) => Some(changed),
            (Rewrite::Refuse(conflict), _) => self.refuse_option(option, conflict, key),
            (Rewrite::KeepUnless(conflict, names), _) => self.without(changed, conflict, names, key),
            (Rewrite::Remove(property), OptionValue::Properties(_)) => {
                let properties = changed.properties_mut()?;
                properties.remove(property);
                let is_empty = properties.pairs().is_empty();
                (!is_empty).then_some(changed)
            }
            (Rewrite::File | Rewrite::Disk, OptionValue::Text(path)) => {
                self.has_known_path(path, key).then_some(changed)
            }
            (Rewrite::Drive, OptionValue::Properties(properties)) => self.drive(changed, properties, key),
            (Rewrite::Port, OptionValue::Text(text)) => self.port(option, text, key),
            (Rewrite::Pidfile, OptionValue::Text(path)) => {
                self.staged(path, key).and_then(|staged| self::option("pidfile", &staged))
            }
            (Rewrite::Monitor, OptionValue::Properties(properties)) => {
                let is_launchers = properties.value("chardev").as_deref() == Some(LAUNCHERS_MONITOR);
                (!is_launchers).then_some(changed)
            }
            (Rewrite::Append, OptionValue::Properties(properties)) => {
                changed.properties_mut()?.set_switch("append", true);
                let path = properties.value("path").unwrap_or_default();
                self.has_known_path(&path, key).then_some(changed)
            }
            (Rewrite::Socket, OptionValue::Properties(properties)) => self.socket(changed, properties, key),
            (Rewrite::Card, _) => match self.context.cards {
                Cards::Shared => Some(changed),
                Cards::Refused => self.refuse(key, &kind, CARD_REASON),
            },
            (Rewrite::Vsock, _) => match self.context.vsocks {
                Vsocks::Detached => None,
                Vsocks::Refused => self.refuse(key, &kind, VSOCK_REASON),
            },
            (Rewrite::GenerationId, OptionValue::Properties(_)) => {
                // Another one would be written into the guest's memory, and have it believe that it is a clone.
                if let Some(guid) = self.context.generation_id {
                    changed.properties_mut()?.set("guid", guid);
                }
                Some(changed)
            }
            _ => self.refuse_option(option, Conflict::Unknown, key),
        }
    }

    fn refuse_option(&mut self, option: &QemuOption, conflict: Conflict, key: &str) -> Option<QemuOption> {
        let found = match conflict {
            Conflict::Display => option.value_text(),
            Conflict::Terminal => option.id(),
            _ => option.type_name().or_else(|| option.value_text()),
        };
        let reason = match conflict {
            Conflict::Unknown if option.name.as_str() == "device" => MODEL_REASON,
            conflict => reason(conflict),
        };
        self.refuse(key, &found.unwrap_or_default(), reason)
    }

    /// Keeps an option without these properties, which two QEMUs cannot have at a time.
    fn without(
        &mut self,
        option: QemuOption,
        conflict: Conflict,
        names: &str,
        key: &str,
    ) -> Option<QemuOption> {
        let value = |name| option.property(name);
        let Some((name, value)) = names.split(' ').find_map(|name| Some((name, value(name)?))) else {
            return Some(option);
        };
        if conflict == Conflict::Port {
            self.refuse(&format!("{key}.{name}"), &value, reason(conflict))
        } else {
            self.refuse_option(&option, conflict, key)
        }
    }

    /// Returns true if a setting has this key.
    fn is_set_by_user(&self, key: &str) -> bool {
        self.context.settings.iter().any(|setting| setting.key == key)
    }

    /// Returns true if a setting has the key of a property of this option. Ids may have dots: the longest key
    /// that fits is meant.
    fn has_property_set(&self, key: &str) -> bool {
        let is_of = |setting: &Setting, key: &str| {
            setting.key.strip_prefix(key).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
        };
        let is_of_longer = |setting: &Setting| {
            self.keys.iter().any(|other| other.len() > key.len() && is_of(setting, other))
        };
        self.context.settings.iter().any(|setting| is_of(setting, key) && !is_of_longer(setting))
    }

    fn refuse(&mut self, key: &str, found: &str, reason: &str) -> Option<QemuOption> {
        let found: String = found.chars().take(120).collect();
        self.refusals.push(IncompatibleSetting { setting: key.to_owned(), found, reason: reason.to_owned() });
        None
    }

    /// Refuses a relative path of a daemon: QEMU has left its directory since.
    fn has_known_path(&mut self, path: &str, key: &str) -> bool {
        let is_known = !self.is_daemon || Path::new(path).is_absolute();
        if !is_known {
            self.refuse(key, path, DAEMON_REASON);
        }
        is_known
    }

    /// Refuses relative names of a daemon's drive. A name with a protocol (`nbd:…`) is not one of a file.
    fn has_known_files(&mut self, properties: &Properties, key: &str) -> bool {
        let files = FILE_PROPERTIES.iter().filter_map(|name| Some((name, properties.value(name)?)));
        let is_file = |value: &str| !value.contains(':') && !value.is_empty();
        let mut files = files.filter(|(_, value)| is_file(value)).collect::<Vec<_>>().into_iter();
        files.all(|(name, value)| self.has_known_path(&value, &format!("{key}.{name}")))
    }

    fn drive(&mut self, option: QemuOption, properties: &Properties, key: &str) -> Option<QemuOption> {
        if properties.is_on("snapshot") {
            return self.refuse(&format!("{key}.snapshot"), "on", SNAPSHOT_REASON);
        }
        self.has_known_files(properties, key).then_some(option)
    }
}

#[cfg(test)]
mod tests;
