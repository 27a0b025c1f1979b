//! Values of this host that replace an image's: the accelerator, the reach of the guest's network, and the
//! other end of its consoles.

use std::collections::BTreeSet;

use crate::command_line::{CommandLine, OptionName, OptionValue, QemuOption};
use crate::host::HostArguments;
use crate::options::devices;
use crate::options::form::Form;
use crate::settings::{Candidate, ValueOrigin};

/// Bytes of a console that QEMU keeps in a ring buffer.
const RING: &str = "64K";

/// Removes the image's accelerators if this host names one: of several, QEMU takes the first that works.
pub(super) fn accelerator(candidates: &mut Vec<Candidate>, user_arguments: &CommandLine) {
    let is_of_host = |candidate: &Candidate| match &candidate.origin {
        ValueOrigin::Host => names_accelerator(&candidate.option),
        ValueOrigin::Image(trusted) => trusted.contains("accel"),
    };
    if !candidates.iter().any(is_of_host) && !user_arguments.options().iter().any(names_accelerator) {
        return;
    }
    for candidate in candidates.iter_mut().filter(|candidate| !is_of_host(candidate)) {
        if candidate.option.name.as_str() == "machine"
            && let Some(properties) = candidate.option.properties_mut()
        {
            properties.remove("accel");
        }
    }
    candidates.retain(|candidate| match candidate.option.name.as_str() {
        "accel" | "enable-kvm" => is_of_host(candidate),
        "machine" => candidate.option.properties().is_none_or(|properties| !properties.pairs().is_empty()),
        _ => true,
    });
}

/// Lets memory be allocated when the guest touches it, unless this host says otherwise: otherwise an image
/// could take all of it at once.
pub(super) fn preallocation(candidates: &mut Vec<Candidate>) {
    candidates.retain(|candidate| {
        candidate.origin == ValueOrigin::Host || candidate.option.name.as_str() != "mem-prealloc"
    });
    for Candidate { option, origin, .. } in candidates {
        let (ValueOrigin::Image(trusted), "object" | "device") = (origin, option.name.as_str()) else {
            continue;
        };
        let Some(properties) = option.properties_mut() else { continue };
        let keys = ["prealloc", "prealloc-threads"].into_iter();
        keys.filter(|key| !trusted.contains(*key)).for_each(|key| properties.remove(key));
    }
}

fn names_accelerator(option: &QemuOption) -> bool {
    match option.name.as_str() {
        "accel" | "enable-kvm" => true,
        "machine" => option.property("accel").is_some(),
        _ => false,
    }
}

/// Isolates QEMU's own network, including QEMU's default network, and disables the scripts of taps, unless
/// this host says otherwise.
pub(super) fn networks(candidates: &mut Vec<Candidate>, user_arguments: &CommandLine) {
    let has_network = candidates
        .iter()
        .map(|candidate| &candidate.option)
        .chain(user_arguments.options())
        .any(|option| option.name.is_network() || option.name.as_str() == "nodefaults");
    if !has_network {
        // These are QEMU's defaults, which would not be isolated.
        let defaults = ["nic", "user"].into_iter().filter_map(|value| parse("net", value));
        candidates.extend(defaults.map(|option| Candidate {
            option,
            address: "net".into(),
            origin: ValueOrigin::Image(BTreeSet::new()),
        }));
    }
    for Candidate { option, origin, .. } in candidates {
        let ValueOrigin::Image(trusted) = origin else { continue };
        if !option.name.is_network() {
            continue;
        }
        let is_tap = is_tap(option);
        let Some(properties) = option.properties_mut() else { continue };
        if is_tap {
            let is_open = ["fd", "fds", "helper"].iter().any(|key| trusted.contains(*key));
            for key in ["script", "downscript"].into_iter().filter(|key| !trusted.contains(*key)) {
                match properties.value(key).as_deref() {
                    // QEMU refuses both for an open tap.
                    Some("no" | "") if is_open => properties.remove(key),
                    // The defaults are programs: /etc/qemu-ifup and /etc/qemu-ifdown.
                    None if !is_open => properties.set(key, "no"),
                    _ => {}
                }
            }
        } else if properties.value("type").as_deref() == Some("user") {
            let value = properties.value("restrict").filter(|_| trusted.contains("restrict"));
            let is_off = matches!(value.as_deref(), Some("off" | "no" | "false" | "n"));
            properties.set_switch("restrict", !is_off);
            trusted.insert("restrict".to_owned());
        }
    }
}

/// Returns true if it is a network of the host's tap.
pub(super) fn is_tap(option: &QemuOption) -> bool {
    option.name.as_str() == "netdev" && option.property("type").as_deref() == Some("tap")
}

/// Gives serial ports and consoles another end on this host, in place of the image's.
pub(super) fn consoles(candidates: &mut Vec<Candidate>, host: &HostArguments, user_arguments: &CommandLine) {
    let Ok(directory) = host.console_directory.as_deref().map(|path| path.to_str().ok_or(())).transpose()
    else {
        return;
    };
    let consoles = console_chardevs(candidates);
    let options = candidates.iter().map(|candidate| &candidate.option).chain(user_arguments.options());
    let mut ids: BTreeSet<String> = options.filter_map(QemuOption::id).collect();
    let (mut ports, mut logs) = (0, 0);
    let mut added = Vec::new();
    for candidate in candidates.iter_mut().filter(|candidate| candidate.origin != ValueOrigin::Host) {
        let replacement = match (candidate.option.name.as_str(), &candidate.option.value) {
            ("serial", OptionValue::Text(text)) => {
                // The other end is named after the number of the port, never by the image.
                ports += 1;
                let is_replaced = !["none", "null"].contains(&text.as_str()) && port_chardev(text).is_none();
                is_replaced.then(|| match directory {
                    Some(directory) => format!("file:{directory}/serial{}.log", ports - 1),
                    // A ring buffer of QEMU.
                    None => {
                        let id = free_id(&mut ids, ports - 1);
                        added.extend(parse("chardev", &format!("ringbuf,id={id},size={RING}")));
                        format!("chardev:{id}")
                    }
                })
            }
            ("chardev", OptionValue::Properties(properties)) => {
                let id = properties.value("id").filter(|id| consoles.contains(id) && Form::Id.admits(id));
                id.map(|id| match directory {
                    Some(directory) => {
                        logs += 1;
                        let directory = directory.replace(',', ",,");
                        format!("file,id={id},path={directory}/console{}.log", logs - 1)
                    }
                    None => format!("ringbuf,id={id},size={RING}"),
                })
            }
            _ => None,
        };
        if let Some(option) = replacement.and_then(|text| parse(candidate.option.name.as_str(), &text)) {
            candidate.option = option;
            candidate.origin = ValueOrigin::Host;
        }
    }
    candidates.extend(added.into_iter().map(|option| Candidate {
        address: format!("chardev.{}", option.id().unwrap_or_default()),
        option,
        origin: ValueOrigin::Host,
    }));
}

/// Ids of the chardevs of serial ports and of devices whose output is text for people.
fn console_chardevs(candidates: &[Candidate]) -> BTreeSet<String> {
    let chardev = |candidate: &Candidate| match (candidate.option.name.as_str(), &candidate.option.value) {
        ("serial", OptionValue::Text(text)) => port_chardev(text).map(str::to_owned),
        ("device", OptionValue::Properties(properties)) => {
            let is_console = devices::is_console(&properties.value("driver").unwrap_or_default());
            properties.value("chardev").filter(|_| is_console)
        }
        _ => None,
    };
    candidates.iter().filter_map(chardev).collect()
}

/// Returns the id of the chardev that a `-serial` refers to.
pub(super) fn port_chardev(text: &str) -> Option<&str> {
    text.strip_prefix("chardev:").filter(|id| Form::Id.admits(id))
}

fn free_id(ids: &mut BTreeSet<String>, port: usize) -> String {
    let mut id = format!("serial{port}");
    while !ids.insert(id.clone()) {
        id.push_str("-ring");
    }
    id
}

pub(super) fn parse(name: &str, value: &str) -> Option<QemuOption> {
    QemuOption::parse(OptionName::find(name)?, Some(value)).ok()
}
