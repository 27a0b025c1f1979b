//! Conflicts between the QEMUs that several clones are to run in: shared disks, MAC addresses, generation
//! ids.
//!
//! Uses QMP only. A QEMU that does not reply gets no clone: nothing shows that its disks are its own. [`compare`]
//! is pure.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use serde_json::Value;
use towline_channel::Cancel;
use towline_qmp::commands::{BlockDevice, QomGet};
use towline_qmp::{self as qmp, Client, Options};

use super::super::error::Error;
use crate::qemu::{DEVICE_CONTAINERS, OpenFiles, QomChild, generation_id, if_known, qom_children};

/// Maximum number of devices of one QEMU that are queried.
const DEVICES_MAX: usize = 256;

/// Conflicts that were found.
#[derive(Debug, Default)]
pub(super) struct Conflicts {
    /// Destinations that must not get a clone, by their index.
    pub(super) refused: Vec<(usize, Error)>,
    /// Notices for the user.
    pub(super) notes: Vec<String>,
}

/// Facts about one waiting QEMU.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct CloneQemu {
    /// Index in the list of destinations.
    index: usize,
    socket: String,
    drives: Vec<WritableDrive>,
    /// MAC addresses of its network cards, from its command line.
    macs: Vec<String>,
    generation_id: Option<String>,
}

/// A writable drive.
#[derive(Debug, Clone, PartialEq, Eq)]
struct WritableDrive {
    name: String,
    file: String,
    /// Identity of the file, or its name if it is not known here.
    medium: String,
}

/// Compares the QEMUs that replied, of destinations that have a monitor, in their order. The others are refused.
pub(super) fn find(queried: Vec<Option<Result<CloneQemu, qmp::Error>>>) -> Conflicts {
    let (mut qemus, mut refused) = (Vec::new(), Vec::new());
    for (index, found) in queried.into_iter().enumerate() {
        match found {
            Some(Ok(qemu)) => qemus.push(CloneQemu { index, ..qemu }),
            Some(Err(error)) => refused.push((index, error.into())),
            None => {}
        }
    }
    let mut found = compare(&qemus);
    found.refused.extend(refused);
    found
}

fn compare(qemus: &[CloneQemu]) -> Conflicts {
    let mut found = Conflicts { refused: shared_drives(qemus), notes: Vec::new() };
    if qemus.len() < 2 {
        return found;
    }
    let with_cards = qemus.iter().filter(|qemu| !qemu.macs.is_empty()).count();
    if with_cards > 1 {
        let given: usize = qemus.iter().map(|qemu| qemu.macs.len()).sum();
        let different =
            qemus.iter().flat_map(|qemu| &qemu.macs).collect::<std::collections::HashSet<_>>().len();
        let whatever = if different == given { ", whatever `mac=` says here" } else { "" };
        found.notes.push(format!(
            "{with_cards} of the clones have network cards: each sends with the stored guest's MAC addresses{whatever}; keep them in networks of their own, or change them in each guest"
        ));
    }
    let without = qemus.iter().filter(|qemu| qemu.generation_id.is_none()).count();
    if without > 0 {
        found.notes.push(format!(
            "{without} of the clones have no vmgenid device (`-device vmgenid,guid=auto`, the stored guest needs it too): their random numbers stay the same until other entropy is mixed in"
        ));
    }
    let mut ids: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for qemu in qemus {
        ids.entry(qemu.generation_id.as_deref().unwrap_or_default()).or_default().push(&qemu.socket);
    }
    for (id, sockets) in ids.iter().filter(|(id, sockets)| !id.is_empty() && sockets.len() > 1) {
        found.notes.push(format!(
            "QEMUs on {} have the same generation id {id}, so their guests do not see that they are clones: give each its own (`guid=auto`)",
            sockets.join(", ")
        ));
    }
    found
}

/// Destinations that can write a drive that another one can write too.
fn shared_drives(qemus: &[CloneQemu]) -> Vec<(usize, Error)> {
    let mut users: HashMap<&String, Vec<usize>> = HashMap::new();
    for (at, qemu) in qemus.iter().enumerate() {
        qemu.drives.iter().for_each(|drive| users.entry(&drive.medium).or_default().push(at));
    }
    let refusal = |(at, qemu): (usize, &CloneQemu)| {
        qemu.drives.iter().find_map(|drive| {
            let other = users[&drive.medium].iter().find(|&&other| other != at)?;
            let error = Error::SharedDrive {
                socket: qemu.socket.clone(),
                drive: drive.name.clone(),
                file: drive.file.clone(),
                other: qemus[*other].socket.clone(),
            };
            Some((qemu.index, error))
        })
    };
    qemus.iter().enumerate().filter_map(refusal).collect()
}

/// Queries the QEMU at this monitor.
pub(super) fn query(path: &Path, cancel: &Cancel) -> Result<CloneQemu, qmp::Error> {
    let options = Options { interrupt: Some(cancel.descriptor()), ..Options::default() };
    let mut client = Client::connect(path, &options)?;
    let pid = client.peer_credentials().ok().map(|peer| peer.pid).filter(|&pid| pid > 0);
    let drives = client.execute(&towline_qmp::commands::QueryBlock)?;
    let drives = drives.iter().filter_map(|drive| writable(drive, pid)).collect();
    let macs = macs(&mut client)?;
    let generation_id = generation_id(&mut client)?;
    Ok(CloneQemu { index: 0, socket: client.socket().to_owned(), drives, macs, generation_id })
}

fn writable(device: &BlockDevice, pid: Option<i32>) -> Option<WritableDrive> {
    let medium = device.inserted.as_ref().filter(|medium| !medium.ro)?;
    let of = [Some(&device.device), device.qdev.as_ref(), medium.node_name.as_ref()];
    let name = of.into_iter().flatten().find(|name| !name.is_empty());
    Some(WritableDrive {
        name: name.cloned().unwrap_or_default(),
        file: medium.file.clone(),
        medium: medium_of(&medium.file, pid),
    })
}

/// The identity of a file that QEMU has open, or its name if the file cannot be seen from here. The process
/// that listens for a QEMU need not be that QEMU.
fn medium_of(file: &str, pid: Option<i32>) -> String {
    let found = OpenFiles::of(pid).identify(file).or_else(|| OpenFiles::of(None).identify(file));
    found.map_or_else(|| file.to_owned(), |found| found.to_string())
}

/// MAC addresses of the devices of QEMU's command line.
fn macs(client: &mut Client) -> Result<Vec<String>, qmp::Error> {
    let mut macs = Vec::new();
    for container in DEVICE_CONTAINERS {
        for QomChild { name, .. } in qom_children(client, container)?.into_iter().take(DEVICES_MAX) {
            let get = QomGet { path: format!("{container}/{name}"), property: "mac".into() };
            // Other devices than network cards have none.
            if let Some(Value::String(mac)) = if_known(client.execute(&get))? {
                macs.push(mac);
            }
        }
    }
    Ok(macs)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::thread;
    use std::time::Duration;

    use serde_json::{Map, json};
    use towline_qmp::{CommandError, Commands, Server};

    use super::*;

    /// A monitor of a QEMU with one drive, which takes this time for the reply about it.
    struct Busy(Duration);

    impl Commands for Busy {
        fn names(&self) -> &[&'static str] {
            &["query-block", "qom-list"]
        }

        fn execute(&self, name: &str, _: &Map<String, Value>) -> Result<Value, CommandError> {
            if name != "query-block" {
                return Ok(json!([]));
            }
            thread::sleep(self.0);
            let image = json!({ "filename": "nbd://host/disk", "format": "raw", "virtual-size": 1 });
            let medium = json!({ "file": "nbd://host/disk", "ro": false, "drv": "raw", "image": image });
            Ok(json!([{ "device": "disk0", "removable": false, "locked": false, "inserted": medium }]))
        }
    }

    /// Nothing else would keep two guests from the disk of a server.
    #[test]
    fn a_busy_qemu_is_compared_and_one_that_does_not_reply_is_refused() {
        let (place, cancel) = (tempfile::tempdir().unwrap(), Cancel::new().unwrap());
        let paths = ["quick", "busy", "gone"].map(|name| place.path().join(name));
        let started = |path, takes| Server::start(path, Arc::new(Busy(takes))).unwrap();
        let _qemus = [started(&paths[0], Duration::ZERO), started(&paths[1], Duration::from_millis(2100))];
        let found = find(paths.iter().map(|path| Some(query(path, &cancel))).collect());
        let refused: Vec<_> =
            found.refused.iter().map(|(index, error)| (*index, error.to_string())).collect();
        let [(0, first), (1, second), (2, third)] = &refused[..] else { panic!("{refused:?}") };
        for text in [first, second] {
            assert!(text.contains("has the writable drive \"disk0\" (nbd://host/disk)"), "{text}");
        }
        assert!(third.contains("gone"), "{third}");
    }

    fn qemu(index: usize, files: &[&str]) -> CloneQemu {
        let drive = |file: &&str| WritableDrive {
            name: "disk0".into(),
            file: (*file).into(),
            medium: (*file).into(),
        };
        let drives = files.iter().map(drive).collect();
        CloneQemu { index, socket: format!("{index}.qmp"), drives, ..CloneQemu::default() }
    }

    #[test]
    fn only_clones_that_share_a_disk_are_refused() {
        let all = [qemu(0, &["a"]), qemu(2, &["b", "c"]), qemu(3, &["d"]), qemu(5, &["c"])];
        let found = compare(&all);
        let refused: Vec<_> =
            found.refused.iter().map(|(index, error)| (*index, error.to_string())).collect();
        let [(2, first), (5, second)] = &refused[..] else { panic!("{refused:?}") };
        for (text, socket, other) in [(first, "2.qmp", "5.qmp"), (second, "5.qmp", "2.qmp")] {
            let begins =
                format!("QEMU on {socket} has the writable drive \"disk0\" (c), and so has QEMU on {other}");
            assert!(text.starts_with(&begins), "{text}");
        }
    }

    #[test]
    fn shared_addresses_and_ids_of_clones_are_noted() {
        let with = |index, mac: &str, id: Option<&str>| CloneQemu {
            macs: vec![mac.into()],
            generation_id: id.map(Into::into),
            ..qemu(index, &[])
        };
        let found =
            compare(&[with(0, "52:54:00:12:34:56", Some("x")), with(1, "52:54:00:12:34:56", Some("x"))]);
        let [cards, ids] = &found.notes[..] else { panic!("{:?}", found.notes) };
        assert!(cards.starts_with("2 of the clones have network cards: each sends with"), "{cards}");
        assert!(!cards.contains("whatever"), "{cards}");
        assert!(ids.starts_with("QEMUs on 0.qmp, 1.qmp have the same generation id x"), "{ids}");
        let found = compare(&[with(0, "52:54:00:00:00:01", Some("x")), with(1, "52:54:00:00:00:02", None)]);
        let [cards, without] = &found.notes[..] else { panic!("{:?}", found.notes) };
        assert!(cards.contains("whatever `mac=` says here"), "{cards}");
        assert!(without.starts_with("1 of the clones have no vmgenid device"), "{without}");
        assert!(compare(&[with(0, "a", None)]).notes.is_empty(), "a single guest is not a clone");
    }

    #[test]
    fn file_identity_does_not_depend_on_its_path() {
        let directory = std::env::temp_dir();
        let own = i32::try_from(std::process::id()).unwrap();
        let path = directory.join(format!("towline-qemus-{own}"));
        std::fs::write(&path, "").unwrap();
        let twisted = format!("{}/../{}", directory.display(), path.strip_prefix("/").unwrap().display());
        let (plain, other) = (medium_of(path.to_str().unwrap(), None), medium_of(&twisted, Some(own)));
        std::fs::remove_file(&path).unwrap();
        assert_eq!(plain, other);
        assert_ne!(plain, path.display().to_string());
        assert_eq!(medium_of("nbd://host/disk", Some(own)), "nbd://host/disk");
    }
}
