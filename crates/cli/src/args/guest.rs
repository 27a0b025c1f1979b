//! Guests of `towline vsock`: `--guest`, or a TOML file of them.

use std::path::{Path, PathBuf};
use std::str::FromStr;

use anyhow::{Context, Result, anyhow, ensure};
use serde::de::Error as _;
use serde::{Deserialize, Deserializer};
use toml::{Table, Value};
use towline_vsock::{ForwardingRule, guest_cid};

/// A guest and its sockets, by the keys of `--guest` and of a `[[guest]]`.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct GuestSpec {
    #[serde(deserialize_with = "cid")]
    pub(crate) cid: u64,
    pub(crate) socket: PathBuf,
    pub(crate) uds: Option<PathBuf>,
    pub(crate) uds_seqpacket: Option<PathBuf>,
    #[serde(default, deserialize_with = "rules")]
    pub(crate) forward: Vec<ForwardingRule>,
    #[serde(default)]
    pub(crate) group: Vec<String>,
    pub(crate) state: Option<PathBuf>,
}

impl FromStr for GuestSpec {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        let mut table = Table::new();
        for part in text.split(',') {
            let (key, value) =
                part.split_once('=').with_context(|| format!("`{part}`: expected KEY=VALUE"))?;
            match key {
                "cid" => drop(table.insert(key.into(), i64::try_from(guest_cid(value)?)?.into())),
                "forward" | "group" => {
                    let list = table.entry(key).or_insert_with(|| Value::Array(Vec::new()));
                    list.as_array_mut().into_iter().for_each(|list| list.push(value.into()));
                }
                _ => drop(table.insert(key.into(), value.into())),
            }
        }
        ensure!(table.get("socket").and_then(Value::as_str) != Some(""), "`{text}`: socket= is empty");
        table.try_into().map_err(|error: toml::de::Error| anyhow!("`{text}`: {}", error.message()))
    }
}

/// Content of the file.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    guest: Vec<GuestSpec>,
}

/// Reads the guests of a TOML file.
pub(crate) fn read(path: &Path) -> Result<Vec<GuestSpec>> {
    let context = || format!("--config {}", path.display());
    parse(&std::fs::read_to_string(path).with_context(context)?).with_context(context)
}

fn parse(text: &str) -> Result<Vec<GuestSpec>> {
    let File { guest } = toml::from_str(text)?;
    ensure!(!guest.is_empty(), "no [[guest]] in the file");
    Ok(guest)
}

fn cid<'de, D: Deserializer<'de>>(value: D) -> Result<u64, D::Error> {
    guest_cid(&u64::deserialize(value)?.to_string()).map_err(D::Error::custom)
}

fn rules<'de, D: Deserializer<'de>>(value: D) -> Result<Vec<ForwardingRule>, D::Error> {
    let rules = Vec::<String>::deserialize(value)?;
    rules.iter().map(|rule| rule.parse()).collect::<Result<_, _>>().map_err(D::Error::custom)
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
        assert!(rule.contains("line 4") && rule.contains("`x` is not a port"), "{rule}");
    }

    #[test]
    fn errors_of_an_option_name_the_cause() {
        let error = |text: &str| text.parse::<GuestSpec>().unwrap_err().to_string();
        assert_eq!(error("cid=3"), "`cid=3`: missing field `socket`");
        assert_eq!(error("socket=a,cid"), "`cid`: expected KEY=VALUE");
        assert!(error("cid=2,socket=a").contains("`2` is not a guest CID"));
        assert!(
            error("cid=3,socket=a,path=b").contains("unknown field `path`, expected one of `cid`, `socket`")
        );
        assert!(error("cid=3,socket=a,forward=guest:x=unix:/a").contains("`x` is not a port"));
    }
}
