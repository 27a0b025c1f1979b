//! Command lines from anywhere: they are read or refused, and what is allowed names nothing of this host. The
//! body is a fuzz target too.

use std::net::IpAddr;

use towline_launch::command_line::{OptionValue, QemuOption};
use towline_launch::{AllowedCommandLine, CommandLine, HostArguments, Recorded};

/// Directory of this host that an allowed command line may have.
const CONSOLES: &str = "/run/towline-host/guest";

/// Reads bytes as the command line of a process and as a recorded one.
pub fn command_line(bytes: &[u8]) {
    if let Ok(parsed) = CommandLine::parse_proc(bytes) {
        let again =
            CommandLine::parse(parsed.to_arguments()).expect("what was parsed is written as it is parsed");
        assert_eq!(again, parsed);
        if let Ok(recorded) = parsed.record() {
            check_recorded(&recorded);
        }
    }
    if let Ok(recorded) = Recorded::from_json(bytes) {
        check_recorded(&recorded);
    }
}

/// Writes a recorded command line, reads it again, and checks what is allowed of it.
pub fn check_recorded(recorded: &Recorded) {
    let again = Recorded::from_json(recorded.to_json().as_bytes()).expect("what was written is read");
    assert_eq!(&again, recorded);
    let consoles = HostArguments { console_directory: Some(CONSOLES.into()), ..HostArguments::default() };
    for host in [HostArguments::default(), consoles] {
        match recorded.allow(&host) {
            Ok(allowed) => check_allowed(&allowed),
            Err(refused) => assert!(!refused.to_string().is_empty()),
        }
    }
}

/// Fails if an allowed command line names a file, a socket, a program or a URL that is not this host's.
pub fn check_allowed(allowed: &AllowedCommandLine) {
    let line = CommandLine::parse(allowed.to_arguments()).expect("an allowed command line can be read");
    assert_eq!(&line, allowed.command_line());
    for option in line.options() {
        let values: Vec<String> = match &option.value {
            OptionValue::Properties(properties) => {
                properties.pairs().into_iter().map(|(_, value)| value).collect()
            }
            _ => option.value_text().into_iter().collect(),
        };
        for value in values {
            assert!(is_harmless(option, &value), "{option:?}");
        }
    }
}

fn is_harmless(option: &QemuOption, value: &str) -> bool {
    if value.starts_with(CONSOLES) || value.starts_with(&format!("file:{CONSOLES}")) {
        return ["chardev", "serial"].contains(&option.name.as_str());
    }
    if let Some((address, prefix)) = value.split_once('/') {
        let is_network = ["netdev", "net"].contains(&option.name.as_str());
        return is_network && address.parse::<IpAddr>().is_ok() && prefix.parse::<u8>().is_ok();
    }
    let words =
        ["exec", "unix", "tcp", "udp", "file", "pipe", "json", "fd", "rdma", "vsock", "ssh", "nbd", "telnet"];
    !value.contains('\\') && !words.iter().any(|word| value.starts_with(&format!("{word}:")))
}
