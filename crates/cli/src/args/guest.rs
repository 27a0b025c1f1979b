//! Guests of `towline vsock`: `--guest`, or a TOML file of them.

use std::path::{Path, PathBuf};
use std::str::FromStr;

use anyhow::{Context, Result, bail, ensure};
use serde::Deserialize;
use towline_vsock::{ForwardingRule, guest_cid};

/// A guest and its sockets.
#[derive(Debug, Clone, Default)]
pub(crate) struct GuestSpec {
    pub(crate) cid: u64,
    pub(crate) socket: PathBuf,
    pub(crate) uds: Option<PathBuf>,
    pub(crate) uds_seqpacket: Option<PathBuf>,
    pub(crate) forward: Vec<ForwardingRule>,
    pub(crate) group: Vec<String>,
    pub(crate) state: Option<PathBuf>,
}

impl FromStr for GuestSpec {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        let mut guest = Self::default();
        for part in text.split(',') {
            let (key, value) =
                part.split_once('=').with_context(|| format!("`{part}`: expected KEY=VALUE"))?;
            match key {
                "cid" => guest.cid = guest_cid(value)?,
                "socket" => guest.socket = value.into(),
                "uds" => guest.uds = Some(value.into()),
                "uds-seqpacket" => guest.uds_seqpacket = Some(value.into()),
                "forward" => guest.forward.push(value.parse()?),
                "group" => guest.group.push(value.to_owned()),
                "state" => guest.state = Some(value.into()),
                _ => bail!(
                    "unknown key `{key}`: expected cid, socket, uds, uds-seqpacket, forward, group or state"
                ),
            }
        }
        if guest.cid == 0 || guest.socket.as_os_str().is_empty() {
            bail!("`{text}`: cid= and socket= are required");
        }
        Ok(guest)
    }
}

/// Content of the file.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    guest: Vec<GuestEntry>,
}

/// A `[[guest]]`, with the keys of `--guest`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct GuestEntry {
    cid: u64,
    socket: PathBuf,
    uds: Option<PathBuf>,
    uds_seqpacket: Option<PathBuf>,
    #[serde(default)]
    forward: Vec<String>,
    #[serde(default)]
    group: Vec<String>,
    state: Option<PathBuf>,
}

/// Reads the guests of a TOML file.
pub(crate) fn read(path: &Path) -> Result<Vec<GuestSpec>> {
    let context = || format!("--config {}", path.display());
    parse(&std::fs::read_to_string(path).with_context(context)?).with_context(context)
}

fn parse(text: &str) -> Result<Vec<GuestSpec>> {
    let File { guest } = toml::from_str(text)?;
    ensure!(!guest.is_empty(), "no [[guest]] in the file");
    guest.into_iter().map(GuestEntry::into_guest).collect()
}

impl GuestEntry {
    fn into_guest(self) -> Result<GuestSpec> {
        let Self { cid, socket, uds, uds_seqpacket, forward, group, state } = self;
        let cid = guest_cid(&cid.to_string())?;
        let rules = forward.iter().map(|rule| rule.parse::<ForwardingRule>());
        let forward = rules.collect::<Result<_, _>>().with_context(|| format!("guest {cid}"))?;
        Ok(GuestSpec { cid, socket, uds, uds_seqpacket, forward, group, state })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_describes_the_same_guests_as_options() {
        let file = r#"
            [[guest]]
            cid = 3
            socket = "/run/a"
            uds = "/run/a.v"
            uds-seqpacket = "/run/a.m"
            forward = ["guest:80=tcp:127.0.0.1:8080", "cid:9=uds:/run/nine"]
            group = ["lab", "all"]
            state = "/run/a.state"

            [[guest]]
            cid = 4
            socket = "/run/b"
        "#;
        let options = [
            "cid=3,socket=/run/a,uds=/run/a.v,uds-seqpacket=/run/a.m,forward=guest:80=tcp:127.0.0.1:8080,\
             forward=cid:9=uds:/run/nine,group=lab,group=all,state=/run/a.state",
            "cid=4,socket=/run/b",
        ];
        let options: Vec<GuestSpec> = options.iter().map(|text| text.parse().unwrap()).collect();
        assert_eq!(format!("{:?}", parse(file).unwrap()), format!("{options:?}"));
    }

    #[test]
    fn errors_of_a_file_name_the_cause() {
        let error = |text: &str| format!("{:#}", parse(text).unwrap_err());
        assert!(error("guest = []").contains("no [[guest]] in the file"));
        assert!(error("[[guest]]\ncid = 3").contains("missing field `socket`"));
        assert!(error("[[guest]]\ncid = 3\nsocket = 'a'\npath = 'b'").contains("unknown field `path`"));
        assert!(error("[[guest]]\ncid = 2\nsocket = 'a'").contains("`2` is not a guest CID"));
        let rule = error("[[guest]]\ncid = 3\nsocket = 'a'\nforward = ['guest:x=unix:/a']");
        assert!(rule.contains("guest 3: `x` is not a port"), "{rule}");
    }
}
