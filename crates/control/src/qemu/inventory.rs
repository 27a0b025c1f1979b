//! State of a QEMU that its command line need not show, for a comparison with the one that will replace it.
//!
//! ```text
//!   query-block, query-named-block-nodes ─► drives and nodes, with the files that are open (`open_files`), limits, bitmaps
//!   query-jobs, query-block-exports      ─► what runs in it
//!   qom-list, query-chardev, …           ─► devices, objects, character devices: plugged and unplugged since its start
//! ```
//! Out of scope: state that no query shows (passwords, actions, properties of devices that are not part of
//! the guest's state).

use std::collections::BTreeMap;

use serde_json::{Map, Value};

use super::connection::Qemu;
use super::device_tree::{DEVICE_CONTAINERS, QomChild, qom_children};
use super::error::Error;
use super::open_files;
use super::open_files::OpenFiles;

/// Prefixes of the names of a drive's limits in `query-block`.
const LIMITS: [&str; 2] = ["bps", "iops"];
/// Labels of character devices that QEMU creates for an option, or that the launcher adds.
const OWN_CHARDEVS: [&str; 6] = ["towline-", "compat_monitor", "serial", "parallel", "debugcon", "mon"];

/// Kinds of things in a QEMU.
const DRIVE: &str = "drive";
const LIMITS_OF_DRIVE: &str = "limits of drive";
const NODE: &str = "block node";
const BITMAP: &str = "dirty bitmap";
const DEVICE: &str = "device";
const CHARDEV: &str = "character device";
/// Items that the new QEMU may not have if the old one lacks them: the guest would notice.
const OF_THE_GUEST: [&str; 3] = [DRIVE, LIMITS_OF_DRIVE, DEVICE];

/// An item, identified by the properties that are the same in another QEMU.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Item {
    /// Compared.
    value: String,
    /// For people.
    shown: String,
}

/// See the module's text.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Inventory(BTreeMap<(&'static str, String), Item>);

impl Inventory {
    /// Differences of `new` from this, with the location of each value.
    pub(crate) fn differences(&self, new: &Self, [here, there]: [&str; 2]) -> Vec<String> {
        let added = new.0.keys().filter(|key| OF_THE_GUEST.contains(&key.0) && !self.0.contains_key(*key));
        let difference = |key: &(&str, String)| {
            let (old, new) = (self.0.get(key), new.0.get(key));
            let shown = |item: Option<&Item>| item.map_or_else(|| "none".into(), |item| item.shown.clone());
            let is_same = old.map(|item| &item.value) == new.map(|item| &item.value);
            let ((kind, name), old, new) = (key, shown(old), shown(new));
            (!is_same).then(|| format!("{kind} {name:?}: {old} {here}, {new} {there}"))
        };
        self.0.keys().chain(added).filter_map(difference).collect()
    }

    /// Leaves out these character devices, and devices of this type.
    pub(crate) fn without(mut self, chardevs: &[String], device_type: &str) -> Self {
        self.0.retain(|(kind, name), item| match *kind {
            CHARDEV => !chardevs.contains(name),
            DEVICE => !item.value.starts_with(device_type),
            _ => true,
        });
        self
    }

    fn add(&mut self, kind: &'static str, name: &str, value: String) {
        self.insert(kind, name, Item { shown: value.clone(), value });
    }

    fn insert(&mut self, kind: &'static str, name: &str, item: Item) {
        self.0.insert((kind, name.to_owned()), item);
    }

    /// Drives, and nodes that have a name: with the files that are open.
    fn add_drives(&mut self, block: &Value, nodes: &Value, files: &OpenFiles) {
        for entry in entries(block) {
            let (name, inserted) = (open_files::drive_name(entry), &entry["inserted"]);
            if inserted.is_null() {
                continue;
            }
            self.insert(DRIVE, &name, chain(inserted, files));
            let is_limit = |key: &str| LIMITS.iter().any(|limit| key.starts_with(limit));
            let limits = inserted.as_object().into_iter().flatten();
            let limits =
                limits.filter(|(key, value)| is_limit(key) && value.as_u64().is_some_and(|value| value > 0));
            let limits: Vec<_> = limits.map(|(key, value)| format!("{key}={value}")).collect();
            if !limits.is_empty() {
                self.add(LIMITS_OF_DRIVE, &name, limits.join(", "));
            }
        }
        for node in entries(nodes) {
            let name = text(&node["node-name"]);
            // A node without a name belongs to a job.
            let is_lost = |bitmap: &&Value| bitmap["persistent"] != true && !text(&bitmap["name"]).is_empty();
            for bitmap in entries(&node["dirty-bitmaps"]).filter(is_lost) {
                let bitmap = text(&bitmap["name"]);
                self.add(BITMAP, &format!("{name}/{bitmap}"), "one that is not stored in its image".into());
            }
            if !name.starts_with('#') {
                let (file, drv) = (file(text(&node["file"]), files), text(&node["drv"]));
                let value = format!("{drv} {} {}", file.value, node["ro"]);
                self.insert(NODE, name, Item { value, shown: format!("{} ({drv})", file.shown) });
            }
        }
    }
}

impl Qemu {
    /// The block nodes with their files while the guest is stopped.
    ///
    /// # Errors
    /// Those of the monitor.
    pub(crate) fn block_inventory(&mut self) -> Result<Inventory, Error> {
        let mut found = Inventory::default();
        let files = OpenFiles::of(self.process().pid());
        let block = self.list("query-block", None)?;
        let flat = Map::from_iter([("flat".to_owned(), true.into())]);
        let nodes = self.list("query-named-block-nodes", Some(flat))?;
        found.add_drives(&block, &nodes, &files);
        Ok(found)
    }

    /// Everything.
    ///
    /// # Errors
    /// Those of the monitor.
    pub(crate) fn inventory(&mut self) -> Result<Inventory, Error> {
        let mut found = self.block_inventory()?;
        for job in entries(&self.list("query-jobs", None)?) {
            let (kind, status) = (text(&job["type"]), text(&job["status"]));
            found.add("job", text(&job["id"]), format!("{kind}, {status}"));
        }
        for export in entries(&self.list("query-block-exports", None)?) {
            let (kind, node) = (text(&export["type"]), text(&export["node-name"]));
            found.add("export", text(&export["id"]), format!("{kind} of {node}"));
        }
        for path in DEVICE_CONTAINERS {
            for QomChild { name, kind } in qom_children(self.client(), path)? {
                // Devices without an id are numbered, so unplugging one renames the others.
                let number = |number: &usize| found.0.contains_key(&(DEVICE, format!("{kind}[{number}]")));
                let name = if name.starts_with("device[") {
                    format!("{kind}[{}]", (0..).find(|at| !number(at)).unwrap_or_default())
                } else {
                    name
                };
                found.add(DEVICE, &name, kind);
            }
        }
        // QEMU 11 creates those of monitors itself, and memory is mapped by another type.
        let objects = qom_children(self.client(), "/objects")?;
        for object in objects.into_iter().filter(|object| !object.kind.starts_with("monitor-")) {
            let is_memory = object.kind.starts_with("memory-backend-");
            found.add("object", &object.name, if is_memory { "memory backend".into() } else { object.kind });
        }
        for thread in entries(&self.list("query-iothreads", None)?) {
            found.add("iothread", text(&thread["id"]), format!("poll-max-ns={}", thread["poll-max-ns"]));
        }
        for chardev in entries(&self.list("query-chardev", None)?) {
            let label = text(&chardev["label"]);
            if !OWN_CHARDEVS.iter().any(|own| label.starts_with(own)) {
                found.add(CHARDEV, label, "present".into());
            }
        }
        Ok(found)
    }

    /// A list; an empty one if this QEMU does not know the query.
    fn list(&mut self, command: &str, arguments: Option<Map<String, Value>>) -> Result<Value, Error> {
        Ok(self.query_raw(command, arguments)?.unwrap_or_default())
    }
}

fn entries(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

/// A medium with the images below it.
fn chain(inserted: &Value, files: &OpenFiles) -> Item {
    let (mut values, mut shown) = (vec![inserted["ro"].to_string()], Vec::new());
    let mut image = Some(&inserted["image"]);
    while let Some(found) = image.filter(|image| !image.is_null()) {
        let (file, format) = (file(text(&found["filename"]), files), text(&found["format"]));
        values.push(format!("{format} {}", file.value));
        shown.push(format!("{} ({format})", file.shown));
        image = found.get("backing-image");
    }
    Item { value: values.join(" on "), shown: shown.join(" on ") }
}

/// A file by the identity of the open file, or by its name if it is not a file of this host. A name in JSON
/// has further properties.
fn file(name: &str, files: &OpenFiles) -> Item {
    let Some(properties) = name.strip_prefix("json:").and_then(|json| serde_json::from_str(json).ok()) else {
        let Some(found) = files.identify(name) else {
            return Item { value: name.into(), shown: name.into() };
        };
        return Item { value: found.to_string(), shown: format!("{name}, file {found}") };
    };
    let mut properties: Value = properties;
    let mut found = Vec::new();
    identify(&mut properties, files, &mut found);
    Item { value: properties.to_string(), shown: format!("{name}, file {}", found.join(", ")) }
}

/// Replaces the names of files by their identities.
fn identify(value: &mut Value, files: &OpenFiles, found: &mut Vec<String>) {
    for (key, value) in value.as_object_mut().into_iter().flatten() {
        match value.as_str().filter(|_| key == "filename").and_then(|name| files.identify(name)) {
            Some(identity) => {
                found.push(identity.to_string());
                *value = Value::String(identity.to_string());
            }
            None => identify(value, files, found),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const UPGRADE: [&str; 2] = ["in the old QEMU", "in the new one"];

    fn drives(block: &Value, nodes: &Value) -> Inventory {
        let mut found = Inventory::default();
        found.add_drives(block, nodes, &OpenFiles::of(None));
        found
    }

    fn drive(image: &Value) -> Value {
        json!([{ "device": "d0", "qdev": "", "inserted": { "ro": false, "bps": 0, "iops_rd": 0, "image": image } }])
    }

    #[test]
    fn each_image_of_a_chain_is_compared() {
        let chain = |base: &str| {
            let base = json!({ "filename": base, "format": "raw" });
            drives(
                &drive(&json!({ "filename": "/nowhere/top", "format": "qcow2", "backing-image": base })),
                &json!([]),
            )
        };
        assert_eq!(chain("/nowhere/a").differences(&chain("/nowhere/a"), UPGRADE), Vec::<String>::new());
        let [found] = &chain("/nowhere/a").differences(&chain("/nowhere/b"), UPGRADE)[..] else { panic!() };
        assert!(
            found.starts_with(
                "drive \"d0\": /nowhere/top (qcow2) on /nowhere/a (raw) in the old QEMU, /nowhere/top (qcow2) on \
                 /nowhere/b (raw) in the new one"
            ),
            "{found}"
        );
    }

    #[test]
    fn one_file_by_two_names_is_the_same_at_one_offset_only() {
        let directory = tempfile::tempdir().unwrap();
        let (one, other) = (directory.path().join("one"), directory.path().join("other"));
        std::fs::write(&one, "").unwrap();
        std::fs::hard_link(&one, &other).unwrap();
        let raw = |path: &std::path::Path, offset: u64| {
            let file = json!({ "driver": "file", "filename": path });
            let name = format!("json:{}", json!({ "driver": "raw", "offset": offset, "file": file }));
            drives(&drive(&json!({ "filename": name, "format": "raw" })), &json!([]))
        };
        assert_eq!(raw(&one, 512).differences(&raw(&other, 512), UPGRADE), Vec::<String>::new());
        assert_eq!(raw(&one, 512).differences(&raw(&one, 1024), UPGRADE).len(), 1);
    }

    #[test]
    fn what_only_the_new_qemu_has_counts_if_the_guest_has_it() {
        let (mut old, mut new) = (Inventory::default(), Inventory::default());
        new.add("object", "t0", "iothread".into());
        assert_eq!(old.differences(&new, UPGRADE), Vec::<String>::new());
        new.add(DEVICE, "net0", "e1000".into());
        old.add("job", "m0", "mirror, running".into());
        let found = old.differences(&new, UPGRADE);
        assert!(
            found[0].starts_with("job \"m0\": mirror, running in the old QEMU, none in the new one"),
            "{found:?}"
        );
        assert!(
            found[1].starts_with("device \"net0\": none in the old QEMU, e1000 in the new one"),
            "{found:?}"
        );
        assert_eq!(found.len(), 2);
        assert_eq!(old.without(&[], "x").differences(&new.without(&[], "e1000"), UPGRADE).len(), 1);
    }

    #[test]
    fn limits_and_bitmaps_are_found_and_stored_bitmaps_are_not() {
        let mut block = drive(&json!({ "filename": "/nowhere/a", "format": "raw" }));
        block[0]["inserted"]["bps"] = json!(1024);
        let bitmaps = json!([{ "name": "b0", "persistent": false }, { "name": "b1", "persistent": true }]);
        let old =
            drives(&block, &json!([{ "node-name": "#block1", "dirty-bitmaps": bitmaps, "drv": "raw" }]));
        let new = drives(&drive(&json!({ "filename": "/nowhere/a", "format": "raw" })), &json!([]));
        let found = old.differences(&new, UPGRADE);
        assert!(found[0].starts_with("dirty bitmap \"#block1/b0\""), "{found:?}");
        assert!(found[1].starts_with("limits of drive \"d0\": bps=1024 in the old"), "{found:?}");
        assert_eq!(found.len(), 2);
    }
}
