//! The command line of an image, which may come from anyone, and the part of it that is started.
//!
//! Everything is an allow-list: options, types of objects, devices and backends, their properties, and the
//! form of each value ([`Form`]). No form admits a path, so no image can give the argv a path, socket,
//! interface or program of its choice. Values for those come from [`HostArguments`]. Values that an image has
//! in their place are refused rather than ignored, so a guest does not start without a part of it. The
//! exceptions are in [`replace`]: consoles, what QEMU's own network reaches, scripts of taps, and the
//! accelerator, where there is always another value with which the guest is the same.

mod refusal;
mod replace;

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;

pub use refusal::{Refusal, RefusalReason, Refused};

use crate::command_line::{
    CommandLine, CpuModel, Global, OptionName, OptionValue, ParseError, Properties, QemuOption, Repeated,
    Syntax, excerpt,
};
use crate::host::HostArguments;
use crate::limits::{COMMAND_LINE_BYTES_MAX, OPTIONS_MAX};
use crate::names;
use crate::options::form::{Form, Known};
use crate::options::{ImageUse, OptionInfo, devices};
use crate::record::Recorded;
use crate::settings::{self, Candidate, ValueOrigin};

const USER_REASON: &str = "with another user the kernel would not end QEMU with the process that started it; run that process as the user";
const ROOT_REASON: &str = "paths of this command line and of the guest's directory would mean other files; run towline in a container";

/// A command line that may be started. Made by [`Recorded::allow`], or by a caller who trusts its origin.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AllowedCommandLine {
    pub(crate) command_line: CommandLine,
    /// The user's own arguments, which follow unchanged.
    pub(crate) arguments: Vec<OsString>,
    /// The options in them.
    pub(crate) own: CommandLine,
}

impl Recorded {
    /// Accepts what is known to be harmless; everything of the host comes from `host`.
    ///
    /// # Errors
    /// [`Refused::Image`] with all refusals; or a setting or an argument of `host` that is at fault.
    pub fn allow(&self, host: &HostArguments) -> Result<AllowedCommandLine, Refused> {
        let user_arguments = CommandLine::parse(&host.arguments).map_err(Refused::Argument)?;
        let mut candidates = settings::apply(self.command_line(), &host.settings)?;
        let mut refusals = self.missing_secrets(host);
        replace::accelerator(&mut candidates, &user_arguments);
        replace::preallocation(&mut candidates);
        replace::networks(&mut candidates, &user_arguments);
        replace::consoles(&mut candidates, host, &user_arguments);
        candidates.iter().for_each(|candidate| judge(candidate, &mut refusals));
        duplicate_ids(&candidates, &mut refusals);
        unused_memory(&candidates, &user_arguments, &mut refusals);
        if refusals.is_empty() {
            assemble_command_line(candidates, host, &user_arguments)
        } else {
            Err(Refused::Image(refusals))
        }
    }

    /// Accepts everything: the image decides what runs on this host and with which files. Values of `host`
    /// replace the image's.
    ///
    /// # Errors
    /// A secret that was left out and not set; a setting or an argument of `host` that is at fault.
    pub fn trust(&self, host: &HostArguments) -> Result<AllowedCommandLine, Refused> {
        let refusals = self.missing_secrets(host);
        if refusals.is_empty() { self.command_line().trust(host) } else { Err(Refused::Image(refusals)) }
    }

    fn missing_secrets(&self, host: &HostArguments) -> Vec<Refusal> {
        let is_set = |key: &str| {
            host.settings.iter().any(|setting| {
                setting.key == key || key.strip_prefix(&setting.key).is_some_and(|rest| rest.starts_with('.'))
            })
        };
        let missing = self.redacted_keys().iter().filter(|key| !is_set(key));
        missing.map(|key| refusal(key.clone(), "", RefusalReason::LeftOut)).collect()
    }
}

impl CommandLine {
    /// Accepts a command line that the user of this host wrote for this guest: unchanged, with the options of
    /// its process.
    ///
    /// # Errors
    /// A setting or an argument of `host` that is at fault.
    pub fn accept(&self, host: &HostArguments) -> Result<AllowedCommandLine, Refused> {
        let user_arguments = CommandLine::parse(&host.arguments).map_err(Refused::Argument)?;
        assemble_command_line(settings::apply(self, &host.settings)?, host, &user_arguments)
    }

    /// Accepts a command line whose origin is trusted as this host is: that of a process of the same user on
    /// it.
    ///
    /// # Errors
    /// A setting or an argument of `host` that is at fault.
    pub fn trust(&self, host: &HostArguments) -> Result<AllowedCommandLine, Refused> {
        let mut candidates = settings::apply(&self.without_process_options(), &host.settings)?;
        // Those of the host alone: a port of a trusted image keeps the other end that the image names.
        candidates.retain(|candidate| {
            candidate.origin == ValueOrigin::Host || !candidate.option.name.is_of_process()
        });
        let user_arguments = CommandLine::parse(&host.arguments).map_err(Refused::Argument)?;
        assemble_command_line(candidates, host, &user_arguments)
    }
}

impl AllowedCommandLine {
    /// The options, without the user's own arguments.
    pub fn command_line(&self) -> &CommandLine {
        &self.command_line
    }

    /// The options, and after them those of the user's own arguments.
    pub fn whole(&self) -> CommandLine {
        let mut whole = self.command_line.clone();
        whole.options_mut().extend_from_slice(self.own.options());
        whole
    }

    /// Writes it as arguments for people, without the program's name and without secrets.
    pub fn to_shown_arguments(&self) -> Vec<OsString> {
        let recorded = self.whole().without_secrets();
        recorded.map_or_else(|_| Vec::new(), |recorded| recorded.command_line().to_arguments())
    }

    /// Writes it as arguments, without the program's name. They are meant for `execve`, never for a shell.
    pub fn to_arguments(&self) -> Vec<OsString> {
        let mut arguments = self.command_line.to_arguments();
        arguments.extend(self.arguments.iter().cloned());
        arguments
    }
}

fn assemble_command_line(
    candidates: Vec<Candidate>,
    host: &HostArguments,
    user_arguments: &CommandLine,
) -> Result<AllowedCommandLine, Refused> {
    let mut command_line = CommandLine::default();
    for candidate in candidates {
        command_line.push(candidate.option).map_err(Refused::Argument)?;
    }
    let mut options = command_line.options().iter().chain(user_arguments.options());
    options.clone().try_for_each(check_supervised)?;
    // Without an option for it, QEMU opens a window or listens for VNC.
    let is_display =
        |option: &QemuOption| ["display", "nographic", "vnc", "spice"].contains(&option.name.as_str());
    if !options.any(is_display)
        && let Some(display) = replace::parse("display", "none")
    {
        command_line.push(display).map_err(Refused::Argument)?;
    }
    if command_line.options().len() + user_arguments.options().len() > OPTIONS_MAX {
        return Err(Refused::Argument(ParseError::TooManyOptions));
    }
    let (arguments, own) = (host.arguments.clone(), user_arguments.clone());
    let allowed = AllowedCommandLine { command_line, arguments, own };
    let found = allowed.to_arguments().iter().map(|argument| argument.len() + 1).sum();
    if found > COMMAND_LINE_BYTES_MAX {
        return Err(Refused::Argument(ParseError::TooLong { found }));
    }
    Ok(allowed)
}

/// Fails if an option would detach the QEMU from the launcher.
fn check_supervised(option: &QemuOption) -> Result<(), Refused> {
    let has = |key| option.property(key).is_some();
    let (name, reason) = match option.name.as_str() {
        "daemonize" => {
            ("-daemonize", "the process that the launcher supervises would end at once; leave it out")
        }
        "runas" => ("-runas", USER_REASON),
        "run-with" if has("user") => ("-run-with user=", USER_REASON),
        "chroot" => ("-chroot", ROOT_REASON),
        "run-with" if has("chroot") => ("-run-with chroot=", ROOT_REASON),
        _ => return Ok(()),
    };
    Err(Refused::Unsupervised { option: name, reason })
}

fn refusal(setting: String, found: &str, reason: RefusalReason) -> Refusal {
    Refusal { setting, found: excerpt(found), reason }
}

/// Adds the refusals of one option.
fn judge(candidate: &Candidate, refusals: &mut Vec<Refusal>) {
    let Candidate { option, address, origin } = candidate;
    let ValueOrigin::Image(trusted) = origin else { return };
    let whole = || option.value_text().unwrap_or_default();
    let mut refuse = |reason| refusals.push(refusal(address.clone(), &whole(), reason));
    match (option.name.info().image, &option.value) {
        (ImageUse::Never, _) => refuse(RefusalReason::Option),
        (ImageUse::Host, _) => refuse(RefusalReason::Host),
        (ImageUse::Process, OptionValue::Properties(properties)) if is_no_display(option, properties) => {}
        (ImageUse::Process, OptionValue::Text(text))
            if option.name.as_str() == "monitor" && text == "none" => {}
        (ImageUse::Process, _) => refuse(RefusalReason::Process),
        (ImageUse::Text(Form::Empty), OptionValue::Flag) => {}
        (ImageUse::Text(form), OptionValue::Text(text)) if form.admits(text) => {}
        (ImageUse::Text(form), _) => refuse(RefusalReason::Form { expected: form.describe() }),
        (ImageUse::Serial, OptionValue::Text(text))
            if ["none", "null"].contains(&text.as_str()) || replace::port_chardev(text).is_some() => {}
        (ImageUse::Serial, _) => refuse(RefusalReason::Host),
        (ImageUse::Cpu, OptionValue::Cpu(cpu)) if is_cpu(cpu) => {}
        (ImageUse::Cpu, _) => {
            refuse(RefusalReason::Form { expected: "a CPU model and its features".into() });
        }
        (ImageUse::Global, OptionValue::Global(global)) => judge_global(global, refuse),
        (_, OptionValue::Properties(properties)) => {
            let judged = Judged { address, trusted, properties };
            match known_properties(option.name, properties) {
                Ok(known) => judged.judge(&known, refusals),
                Err(type_key) => judged.refuse_type(type_key, refusals),
            }
            judged.judge_format(option.name, refusals);
            judged.judge_tap(option, refusals);
        }
        (_, _) => refuse(RefusalReason::Option),
    }
}

fn is_no_display(option: &QemuOption, properties: &Properties) -> bool {
    option.name.as_str() == "display" && properties.pairs() == [("type", "none".to_owned())]
}

/// A CPU model is a word; so is each part of its features.
fn is_cpu(cpu: &CpuModel) -> bool {
    let is_feature = |feature: &String| {
        let (name, value) = feature.split_once('=').unwrap_or((feature, "on"));
        Form::Word.admits(name.strip_prefix(['+', '-']).unwrap_or(name)) && Form::Label.admits(value)
    };
    Form::Word.admits(&cpu.model) && cpu.features.iter().all(is_feature)
}

fn judge_global(global: &Global, mut refuse: impl FnMut(RefusalReason)) {
    match devices::global(&global.driver, &global.property) {
        None => refuse(RefusalReason::Property),
        Some(form) if form.admits(&global.value) => {}
        Some(Form::Host) => refuse(RefusalReason::Host),
        Some(form) => refuse(RefusalReason::Form { expected: form.describe() }),
    }
}

/// Returns the properties that an option with these may have; or the key of its type, if an image may not
/// have that type.
fn known_properties(name: OptionName, properties: &Properties) -> Result<Vec<Known>, &'static str> {
    let OptionInfo { syntax, image, types, .. } = name.info();
    match (image, syntax) {
        (ImageUse::Properties(known), _) => Ok(known.to_vec()),
        (ImageUse::Typed(common), Syntax::Properties { implied: Some(key), repeated, .. }) => {
            let groups = match properties.value(key) {
                // Another option of this name has it.
                None if repeated == Repeated::Merged => &[],
                kind => {
                    let kind = kind.filter(|kind| Form::Word.admits(kind)).ok_or(key)?;
                    names::find(types.image, &kind).ok_or(key)?.0
                }
            };
            let id = (repeated == Repeated::ById).then_some((Form::Id, "id"));
            let own = [(Form::Word, key)].into_iter().chain(id);
            Ok(own.chain([common].iter().chain(groups).copied().flatten().copied()).collect())
        }
        _ => Ok(Vec::new()),
    }
}

/// Properties of one option, most of them an image's.
struct Judged<'a> {
    address: &'a str,
    /// Keys whose values come from this host.
    trusted: &'a BTreeSet<String>,
    properties: &'a Properties,
}

impl Judged<'_> {
    fn judge(&self, known: &[Known], refusals: &mut Vec<Refusal>) {
        let mut seen = BTreeMap::new();
        for (key, value) in self.properties.pairs() {
            if self.trusted.contains(key) {
                continue;
            }
            let mut refuse =
                |reason| refusals.push(refusal(format!("{}.{key}", self.address), &value, reason));
            let form = names::find(known, key).map(|(form, _)| form);
            let times = seen.entry(key.to_owned()).or_insert(0);
            *times += 1;
            match form {
                None => refuse(RefusalReason::Property),
                Some(Form::Host) => refuse(RefusalReason::Host),
                Some(form) if *times > 1 && form != Form::Ranges => refuse(RefusalReason::Repeated),
                Some(form) if form.admits(&value) => {}
                Some(form) => refuse(RefusalReason::Form { expected: form.describe() }),
            }
        }
    }

    fn refuse_type(&self, key: &str, refusals: &mut Vec<Refusal>) {
        let value = self.properties.value(key).unwrap_or_default();
        refusals.push(refusal(format!("{}.{key}", self.address), &value, RefusalReason::Type));
    }

    /// If a disk's file comes from this host, so must its format.
    fn judge_format(&self, name: OptionName, refusals: &mut Vec<Refusal>) {
        let has = |key: &str| self.trusted.contains(key);
        let has_file = self.trusted.iter().any(|key| key == "file" || key.starts_with("file."));
        if name.as_str() == "drive" && has_file && !has("format") && !has("driver") {
            refusals.push(refusal(format!("{}.format", self.address), "", RefusalReason::Format));
        }
    }

    /// A tap belongs to this host: without a name, QEMU creates one.
    fn judge_tap(&self, option: &QemuOption, refusals: &mut Vec<Refusal>) {
        let is_named = |key: &str| self.properties.value(key).is_some();
        if replace::is_tap(option) && !["br", "fd", "fds", "helper", "ifname"].into_iter().any(is_named) {
            refusals.push(refusal(format!("{}.ifname", self.address), "", RefusalReason::Host));
        }
    }
}

/// Adds refusals of memory that no other option refers to: the size of an image bounds its guest's memory,
/// but not this.
fn unused_memory(candidates: &[Candidate], user_arguments: &CommandLine, refusals: &mut Vec<Refusal>) {
    let options = || candidates.iter().map(|candidate| &candidate.option).chain(user_arguments.options());
    let is_used = |id: &String, object: &QemuOption| {
        let refers = |properties: &Properties| properties.pairs().iter().any(|(_, value)| value == id);
        options().any(|other| !std::ptr::eq(other, object) && other.properties().is_some_and(refers))
    };
    for Candidate { option, address, origin } in candidates {
        let kind = option.property("qom-type");
        let is_memory =
            option.name.as_str() == "object" && kind.is_some_and(|kind| kind.starts_with("memory-backend-"));
        if let (true, ValueOrigin::Image(_), Some(id)) = (is_memory, origin, option.id())
            && !is_used(&id, option)
        {
            refusals.push(refusal(address.clone(), "", RefusalReason::UnusedMemory));
        }
    }
}

/// Adds refusals of ids that two options of the same kind have.
fn duplicate_ids(candidates: &[Candidate], refusals: &mut Vec<Refusal>) {
    let mut seen = BTreeSet::new();
    for candidate in candidates {
        let Some(id) = candidate.option.id() else { continue };
        if candidate.option.name.as_str() != "numa" && !seen.insert((candidate.option.name, id.clone())) {
            refusals.push(refusal(candidate.address.clone(), &id, RefusalReason::DuplicateId));
        }
    }
}

#[cfg(test)]
mod tests;
