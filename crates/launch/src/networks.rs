//! Networks of a fork: a second guest with the same addresses must not be in the network of the first.
//!
//! ```text
//!   -netdev tap,ifname=tap0,vhost=on   ─► -netdev tap,vhost=on,script=no,downscript=no    an interface that is in no bridge
//!   -netdev bridge,br=br0              ─► as above
//!   -netdev user                       ─► unchanged: every QEMU has its own
//!   others                             ─► refused
//! ```
//! What a setting of this host changes is used as it is then, unless it is in the bridge that the first guest is in.

use std::fs;
use std::path::Path;

use crate::command_line::QemuOption;
use crate::record::Recorded;
use crate::settings::{Setting, SettingError, ValueOrigin, apply};

/// Types of networks that nothing outside of their QEMU is in.
const OWN_NETWORKS: [&str; 4] = ["user", "none", "nic", "hubport"];
/// Properties that put an interface into a network.
const PLACES: [&str; 9] =
    ["ifname", "br", "helper", "script", "downscript", "fd", "fds", "vhostfd", "vhostfds"];
/// QEMU's own bridge of `-netdev bridge`.
const DEFAULT_BRIDGE: &str = "br0";

/// Networks of a fork that are not those of its guest.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct SeparateNetworks {
    /// Settings that separate them.
    pub settings: Vec<Setting>,
    /// Names of the networks that are connected to nothing.
    pub unconnected: Vec<String>,
}

/// A network that a fork would share with its guest.
#[derive(Debug, thiserror::Error)]
pub enum SharedNetwork {
    /// It cannot be separated.
    #[error(
        "{setting}: a fork would be in the network of its guest, with the same addresses: it is of type {found}"
    )]
    Type { setting: String, found: String },
    /// The bridge is the guest's.
    #[error("{setting}: a fork would be in bridge {bridge}, in which its guest is, with the same addresses")]
    Bridge { setting: String, bridge: String },
    /// A setting cannot be applied.
    #[error("{0}")]
    Setting(#[from] SettingError),
}

impl Recorded {
    /// Separates the networks of a fork, which has these settings of this host, from those of its guest.
    ///
    /// # Errors
    /// [`SharedNetwork`].
    pub fn separate_networks(&self, settings: &[Setting]) -> Result<SeparateNetworks, SharedNetwork> {
        let line = self.command_line();
        let keys = line.setting_keys();
        let mut separate = SeparateNetworks::default();
        for candidate in
            apply(line, settings)?.into_iter().filter(|candidate| candidate.option.name.is_network())
        {
            let setting = candidate.address;
            let before = keys.iter().position(|key| *key == setting).map(|index| &line.options()[index]);
            let is_set = match candidate.origin {
                ValueOrigin::Host => true,
                ValueOrigin::Image(trusted) => !trusted.is_empty(),
            };
            let Some(properties) = candidate.option.properties() else { continue };
            let found = properties.value("type").unwrap_or_default();
            if OWN_NETWORKS.contains(&found.as_str()) {
                continue;
            }
            if is_set {
                match bridge(&candidate.option)
                    .filter(|bridge| before.and_then(self::bridge).as_ref() == Some(bridge))
                {
                    Some(bridge) => return Err(SharedNetwork::Bridge { setting, bridge }),
                    None => continue,
                }
            }
            if !["tap", "bridge"].contains(&found.as_str()) {
                return Err(SharedNetwork::Type { setting, found });
            }
            separate.unconnected.extend(candidate.option.id());
            let value = unconnected(candidate.option.clone());
            separate.settings.push(Setting { key: setting, value });
        }
        Ok(separate)
    }
}

/// The network as another interface, which is in no bridge.
fn unconnected(mut network: QemuOption) -> String {
    if let Some(properties) = network.properties_mut() {
        PLACES.iter().for_each(|key| properties.remove(key));
        properties.set("type", "tap");
        properties.set("script", "no");
        properties.set("downscript", "no");
    }
    network.value_text().unwrap_or_default()
}

/// The bridge in which a network is, as far as it is known.
fn bridge(network: &QemuOption) -> Option<String> {
    let properties = network.properties()?;
    let value = |key: &str| properties.value(key).filter(|value| !value.is_empty());
    if value("type").as_deref() == Some("bridge") || value("helper").is_some() {
        return value("br").or_else(|| Some(DEFAULT_BRIDGE.into()));
    }
    let interface = value("ifname")?;
    let master = fs::read_link(Path::new("/sys/class/net").join(interface).join("master")).ok()?;
    Some(master.file_name()?.to_str()?.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command_line::CommandLine;

    fn separate(arguments: &[&str], settings: &[&str]) -> Result<SeparateNetworks, SharedNetwork> {
        let recorded = CommandLine::parse(arguments).unwrap().record().unwrap();
        let settings: Vec<_> = settings.iter().map(|setting| setting.parse().unwrap()).collect();
        recorded.separate_networks(&settings)
    }

    #[test]
    fn a_fork_is_in_no_network_of_its_guest() {
        let line =
            ["-netdev", "tap,id=a,ifname=tap0,vhost=on", "-netdev", "bridge,id=b", "-netdev", "user,id=c"];
        let found = separate(&line, &[]).unwrap();
        let settings: Vec<_> =
            found.settings.iter().map(|Setting { key, value }| format!("{key}={value}")).collect();
        let expected = [
            "netdev.a=tap,id=a,vhost=on,script=no,downscript=no",
            "netdev.b=tap,id=b,script=no,downscript=no",
        ];
        assert_eq!(settings, expected);
        assert_eq!(found.unconnected, ["a", "b"]);
        // A card keeps its model and address.
        let found = separate(&["-nic", "tap,ifname=tap0,model=e1000,mac=52:54:00:00:00:01"], &[]).unwrap();
        assert_eq!(found.settings[0].value, "tap,model=e1000,mac=52:54:00:00:00:01,script=no,downscript=no");
    }

    #[test]
    fn networks_of_this_host_are_used_unless_they_are_the_guests() {
        let line = ["-netdev", "bridge,id=a,br=br7", "-netdev", "stream,id=b,addr.type=unix,addr.path=/x"];
        let found = separate(&line, &["netdev.a.br=br8", "netdev.b=user"]).unwrap();
        assert_eq!(found, SeparateNetworks::default());
        let text = |settings: &[&str]| separate(&line, settings).unwrap_err().to_string();
        let same = "netdev.a: a fork would be in bridge br7, in which its guest is, with the same addresses";
        assert_eq!(text(&["netdev.a.br=br7"]), same);
        let stream = "netdev.b: a fork would be in the network of its guest, with the same addresses: it is of type stream";
        assert_eq!(text(&[]), stream);
    }
}
