//! Parameters of a resource: from the environment, and as the meta-data describes them.

use std::fmt::Write as _;
use std::path::PathBuf;
use std::time::Duration;

use towline_control::check::LANES_DEFAULT;
use towline_launch::{GuestName, Setting};

use super::refusal::{Code, Refusal, say};
use crate::units;

/// Shortest time for what an action does, and for what it does when that has failed.
pub(super) const TIMEOUT_MIN: Duration = Duration::from_secs(5);
/// Limit of an action without one.
const TIMEOUT: Duration = Duration::from_secs(60);
const PEER_TIMEOUT_SECONDS: u64 = 5;
const LANES_MAX: usize = 64;
/// Actions, as `name timeout`, with the seconds that are right for small guests.
const ACTIONS: [(&str, u32); 7] = [
    ("start", 60),
    ("stop", 120),
    ("migrate_to", 120),
    ("migrate_from", 60),
    ("reload-agent", 10),
    ("meta-data", 10),
    ("validate-all", 20),
];

/// A parameter, as the meta-data describes it.
pub(super) struct Parameter {
    name: &'static str,
    kind: &'static str,
    /// `None`: it has no fixed one.
    default: Option<&'static str>,
    /// A change of it does not restart the guest.
    is_reloadable: bool,
    about: &'static str,
}

const PARAMETERS: [Parameter; 13] = [
    fixed("name", None, "Name of the guest; that of the resource by default"),
    fixed(
        "image",
        None,
        "Image that the guest is started from first, and whose command line it has. It never changes",
    ),
    fixed(
        "state",
        None,
        "Directory on storage of all hosts, in which each guest has a directory with its generations and what it was saved to. It exists on the storage, not below an empty mount point",
    ),
    fixed(
        "set",
        Some(""),
        "Values for the command line, as OPTION.KEY=VALUE, separated by white space, as with `towline run --set`",
    ),
    fixed("trust", Some("false"), "Use the command line of the image unchanged, with its files and programs"),
    fixed("qemu", Some("qemu-system-x86_64"), "The QEMU to start"),
    tuning(
        "save",
        "boolean",
        "true",
        "Save the guest when it is stopped; else it is ended, and started from an older state",
    ),
    tuning(
        "shared_disks",
        "boolean",
        "false",
        "The guest's disks are the same on all hosts, also where that cannot be proven (block devices)",
    ),
    tuning("ssh", "string", "ssh -o BatchMode=yes", "OpenSSH's client, with options"),
    tuning("target", "string", "{node}", "Name of another host for ssh; {node} is that of the cluster"),
    tuning("lanes", "integer", "4", "Lanes of a live move"),
    tuning(
        "bandwidth",
        "string",
        "0",
        "Bytes per second of a live move, with suffix K, M or G; 0: unlimited",
    ),
    tuning(
        "peer_timeout",
        "integer",
        "5",
        "Seconds of silence after which a live move takes the other host for lost. The cluster fences nothing meanwhile",
    ),
];

pub(super) const fn fixed(
    name: &'static str,
    default: Option<&'static str>,
    about: &'static str,
) -> Parameter {
    Parameter { name, kind: "string", default, is_reloadable: false, about }
}

const fn tuning(
    name: &'static str,
    kind: &'static str,
    default: &'static str,
    about: &'static str,
) -> Parameter {
    Parameter { name, kind, default: Some(default), is_reloadable: true, about }
}

/// The parameters of a resource.
#[derive(Debug)]
pub(super) struct Parameters {
    pub(super) name: GuestName,
    pub(super) image: PathBuf,
    /// Directory of all guests.
    pub(super) state: PathBuf,
    pub(super) settings: Vec<Setting>,
    pub(super) is_trusted: bool,
    pub(super) qemu: PathBuf,
    pub(super) saves: bool,
    pub(super) has_shared_disks: bool,
    pub(super) ssh: String,
    target: String,
    pub(super) lanes: usize,
    /// `None`: unlimited.
    pub(super) bandwidth: Option<u64>,
    pub(super) peer_timeout: Duration,
}

/// Treatment of a parameter that is not usable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Reading {
    /// It ends the action.
    Strict,
    /// It is as if it were not given: a guest that it could be of was not started. A stop that fails would cost the host.
    Lenient,
}

impl Reading {
    fn of<T>(self, found: Result<T, Refusal>, otherwise: T) -> Result<T, Refusal> {
        match (self, found) {
            (Self::Lenient, Err(refusal)) => {
                say(&refusal.reason.unwrap_or_default());
                Ok(otherwise)
            }
            (_, found) => found,
        }
    }
}

impl Parameters {
    /// Reads the environment.
    pub(super) fn read(reading: Reading) -> Result<Self, Refusal> {
        let settings = value("set").and_then(|set| {
            let setting = |text: &str| text.parse().map_err(|error| unusable("set", &error));
            set.split_whitespace().map(setting).collect::<Result<Vec<Setting>, _>>()
        });
        let bandwidth = number("bandwidth", |text| if text == "0" { Ok(0) } else { units::bytes(text) });
        let timeout = reading.of(number("peer_timeout", units::number::<u64>), PEER_TIMEOUT_SECONDS)?;
        Ok(Self {
            name: name()?,
            image: reading.of(path("image"), PathBuf::new())?,
            state: reading.of(path("state"), PathBuf::new())?,
            settings: reading.of(settings, Vec::new())?,
            is_trusted: reading.of(boolean("trust"), false)?,
            qemu: value("qemu")?.into(),
            saves: reading.of(boolean("save"), true)?,
            has_shared_disks: reading.of(boolean("shared_disks"), false)?,
            ssh: value("ssh")?,
            target: value("target")?,
            lanes: reading.of(number("lanes", units::number::<usize>), LANES_DEFAULT)?.clamp(1, LANES_MAX),
            bandwidth: Some(reading.of(bandwidth, 0)?).filter(|&bytes| bytes > 0),
            peer_timeout: Duration::from_secs(timeout.max(1)),
        })
    }

    /// Name for ssh of another host of the cluster.
    pub(super) fn target(&self, node: &str) -> String {
        self.target.replace("{node}", node)
    }
}

/// The guest's name.
pub(super) fn name() -> Result<GuestName, Refusal> {
    let resource = std::env::var("OCF_RESOURCE_INSTANCE").unwrap_or_default();
    // `ID:N` of a clone.
    let resource = resource.split(':').next().unwrap_or_default();
    let name = value("name").unwrap_or_else(|_| resource.to_owned());
    name.parse().map_err(|error| unusable("name", &error))
}

/// Time that Pacemaker gives this action.
pub(super) fn timeout() -> Duration {
    let text = std::env::var("OCF_RESKEY_CRM_meta_timeout").ok();
    text.and_then(|text| text.parse().ok()).map_or(TIMEOUT, Duration::from_millis)
}

/// The host that a guest goes to.
pub(super) fn migrate_target() -> Result<String, Refusal> {
    std::env::var("OCF_RESKEY_CRM_meta_migrate_target")
        .map_err(|_| Refusal::new(Code::Arguments, "no host to move the guest to is given"))
}

fn value(name: &str) -> Result<String, Refusal> {
    let default = || PARAMETERS.iter().find(|parameter| parameter.name == name)?.default.map(str::to_owned);
    let given = std::env::var(format!("OCF_RESKEY_{name}")).ok().filter(|value| !value.is_empty());
    given.or_else(default).ok_or_else(|| unusable(name, &"it is required"))
}

fn path(name: &str) -> Result<PathBuf, Refusal> {
    let path = PathBuf::from(value(name)?);
    if path.is_absolute() { Ok(path) } else { Err(unusable(name, &"expected an absolute path")) }
}

fn boolean(name: &str) -> Result<bool, Refusal> {
    match value(name)?.to_ascii_lowercase().as_str() {
        "true" | "yes" | "on" | "1" => Ok(true),
        "false" | "no" | "off" | "0" => Ok(false),
        other => Err(unusable(name, &format!("expected true or false, found {other:?}"))),
    }
}

fn number<T>(name: &str, parse: impl FnOnce(&str) -> Result<T, String>) -> Result<T, Refusal> {
    parse(&value(name)?).map_err(|error| unusable(name, &error))
}

fn unusable(name: &str, reason: &dyn std::fmt::Display) -> Refusal {
    Refusal::new(Code::Configured, format!("parameter {name}: {reason}"))
}

/// An agent, as its meta-data describes it.
pub(super) struct AgentAbout {
    pub(super) name: &'static str,
    pub(super) short: &'static str,
    pub(super) long: &'static str,
    pub(super) parameters: &'static [Parameter],
    /// As `name timeout`, in seconds.
    pub(super) actions: &'static [(&'static str, u32)],
    /// Roles in which it is monitored, each with the seconds between.
    pub(super) monitored: &'static [(&'static str, u32)],
}

/// The agent of a guest.
pub(super) const GUEST: AgentAbout = AgentAbout {
    name: "guest",
    short: "QEMU guest, moved live by towline",
    long: "Runs a QEMU guest from an image on shared storage by towline, moves it live to another host, saves it when it is stopped, and \
           starts it from its newest state. See cluster.md in towline's documentation.",
    parameters: &PARAMETERS,
    actions: &ACTIONS,
    monitored: &[("Started", 10)],
};

/// The meta-data of an agent (OCF 1.1).
pub(super) fn meta_data(agent: &AgentAbout) -> String {
    let AgentAbout { name, short, long, parameters, actions, monitored } = *agent;
    let mut xml = format!(
        "<?xml version=\"1.0\"?>\n<!DOCTYPE resource-agent SYSTEM \"ra-api-1.dtd\">\n\
         <resource-agent name=\"{name}\" version=\"1.0\">\n<version>1.1</version>\n<longdesc lang=\"en\">{long}</longdesc>\n\
         <shortdesc lang=\"en\">{short}</shortdesc>\n<parameters>\n"
    );
    for Parameter { name, kind, default, is_reloadable, about } in parameters {
        let default =
            default.map_or_else(String::new, |default| format!(" default=\"{}\"", escaped(default)));
        let (unique, required) = (u8::from(*name == "name"), u8::from(matches!(*name, "image" | "state")));
        let reloadable = u8::from(*is_reloadable);
        let _ = writeln!(
            xml,
            "<parameter name=\"{name}\" unique=\"{unique}\" required=\"{required}\" reloadable=\"{reloadable}\">\
             <longdesc lang=\"en\">{about}.</longdesc><shortdesc lang=\"en\">{name}</shortdesc>\
             <content type=\"{kind}\"{default}/></parameter>",
            about = escaped(about)
        );
    }
    xml.push_str("</parameters>\n<actions>\n");
    for (name, seconds) in actions {
        let _ = writeln!(xml, "<action name=\"{name}\" timeout=\"{seconds}s\"/>");
    }
    for (role, seconds) in monitored {
        let _ = writeln!(
            xml,
            "<action name=\"monitor\" timeout=\"20s\" interval=\"{seconds}s\" depth=\"0\" role=\"{role}\"/>"
        );
    }
    xml.push_str("</actions>\n</resource-agent>\n");
    xml
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A stop, or a monitor, that refuses a value costs the host.
    #[test]
    fn a_value_that_is_not_usable_ends_a_start_and_not_a_stop() {
        let refusal = || Err(unusable("lanes", &"expected a number"));
        assert_eq!(Reading::Lenient.of(refusal(), 4).unwrap(), 4);
        assert_eq!(Reading::Strict.of::<usize>(refusal(), 4).unwrap_err().code, Code::Configured);
        assert_eq!(Reading::Strict.of(Ok(2), 4).unwrap(), 2);
    }

    #[test]
    fn defaults_of_the_meta_data_are_usable() {
        for parameter in PARAMETERS.iter().filter(|parameter| parameter.default.is_none()) {
            assert!(["name", "image", "state"].contains(&parameter.name), "{}", parameter.name);
        }
        let without = Parameters::read(Reading::Lenient).err();
        // Only a name has no default.
        assert!(without.unwrap().reason.unwrap().starts_with("parameter name"));
        assert_eq!(number("peer_timeout", units::number::<u64>).unwrap(), PEER_TIMEOUT_SECONDS);
        assert_eq!(number("lanes", units::number::<usize>).unwrap(), LANES_DEFAULT);
        assert!(!boolean("trust").unwrap() && boolean("save").unwrap() && !boolean("shared_disks").unwrap());
        let meta_data = meta_data(&GUEST);
        for text in [
            "<parameter name=\"bandwidth\" unique=\"0\" required=\"0\" reloadable=\"1\">",
            "<action name=\"migrate_to\"",
        ] {
            assert!(meta_data.contains(text), "{meta_data}");
        }
    }
}
