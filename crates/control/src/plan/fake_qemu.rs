//! A scripted QEMU for tests of the driver: it has a monitor, replies as its fields say, and keeps the
//! commands that change something.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread;
use std::time::Duration;

use serde_json::{Map, Value, json};
use tempfile::TempDir;
use towline_channel::Cancel;
use towline_qmp::{CommandError, Commands, Server};

use super::context::Context;
use super::request::CopyRequest;
use crate::lock::lock;

const NAMES: [&str; 21] = [
    "query-cpus-fast",
    "human-monitor-command",
    "qom-get",
    "qom-list",
    "query-migrate-capabilities",
    "query-migrate-parameters",
    "query-status",
    "query-migrate",
    "query-uuid",
    "query-named-block-nodes",
    "query-yank",
    "migrate-set-capabilities",
    "migrate-set-parameters",
    "stop",
    "cont",
    "migrate-incoming",
    "migrate",
    "migrate_cancel",
    "block-export-add",
    "device_add",
    "quit",
];
const RAM_BLOCKS: &str =
    "              Block Name    PSize              Offset               Used              Total\n";

/// Runs `test` in the context of a copy that nothing cancels.
pub(super) fn in_copy<T>(test: impl FnOnce(&Context<'_>) -> T) -> T {
    test(&Context::new(&CopyRequest::default(), 0, &Cancel::new().unwrap(), &()))
}

/// Replies of the QEMU.
#[derive(Debug)]
pub(crate) struct Script {
    /// Run state.
    pub(crate) status: &'static str,
    /// Status of its migration, if it has one.
    pub(crate) migration: Option<&'static str>,
    /// It never cleans up its last migration.
    pub(crate) keeps_migration: bool,
    /// Run state after `cont`; `None`: it is refused.
    pub(crate) cont: Option<&'static str>,
    /// Threads of its vCPUs. With one of this process, that is the process of this QEMU.
    pub(crate) vcpus: Vec<i32>,
    /// A command, and the time that its reply takes.
    pub(crate) delayed: Option<(&'static str, Duration)>,
    /// Devices below `/machine/peripheral`.
    pub(crate) devices: Vec<&'static str>,
    /// Number of `device_add`s that are refused.
    pub(crate) refused_devices: u32,
    capabilities: BTreeMap<String, bool>,
    commands: Vec<String>,
}

/// See the module's text.
pub(crate) struct FakeQemu {
    script: Arc<Mutex<Script>>,
    directory: TempDir,
    _server: Server,
}

struct Monitor(Arc<Mutex<Script>>);

impl FakeQemu {
    /// A QEMU in this run state.
    pub(crate) fn start(status: &'static str) -> Self {
        let known = [
            "multifd",
            "late-block-activate",
            "return-path",
            "events",
            "postcopy-ram",
            "xbzrle",
            "pause-before-switchover",
        ];
        let script = Arc::new(Mutex::new(Script {
            status,
            migration: None,
            keeps_migration: false,
            cont: Some("running"),
            vcpus: Vec::new(),
            delayed: None,
            devices: Vec::new(),
            refused_devices: 0,
            capabilities: known.map(|name| (name.to_owned(), false)).into(),
            commands: Vec::new(),
        }));
        let directory = TempDir::new().unwrap();
        let server =
            Server::start(&directory.path().join("qmp"), Arc::new(Monitor(Arc::clone(&script)))).unwrap();
        Self { script, directory, _server: server }
    }

    pub(crate) fn path(&self) -> PathBuf {
        self.directory.path().join("qmp")
    }

    pub(crate) fn script(&self) -> MutexGuard<'_, Script> {
        lock(&self.script)
    }

    /// The commands so far that change something, in their order.
    pub(crate) fn commands(&self) -> Vec<String> {
        self.script().commands.clone()
    }

    pub(crate) fn has(&self, capability: &str) -> bool {
        self.script().capabilities[capability]
    }
}

impl Commands for Monitor {
    fn names(&self) -> &[&'static str] {
        &NAMES
    }

    fn execute(&self, name: &str, arguments: &Map<String, Value>) -> Result<Value, CommandError> {
        let mut script = lock(&self.0);
        if let Some((_, time)) = script.delayed.filter(|(delayed, _)| *delayed == name) {
            drop(script);
            thread::sleep(time);
            script = lock(&self.0);
        }
        if !name.starts_with("query-") && !["human-monitor-command", "qom-get", "qom-list"].contains(&name) {
            let node = arguments.get("node-name").and_then(Value::as_str);
            script.commands.push(node.map_or_else(|| name.to_owned(), |node| format!("{name} {node}")));
        }
        Ok(match name {
            "human-monitor-command" => json!(RAM_BLOCKS),
            "qom-get" => json!("pc-q35-7.2-machine"),
            "qom-list" => {
                script.devices.iter().map(|name| json!({ "name": name, "type": "child<x>" })).collect()
            }
            "query-migrate-capabilities" => {
                let states = script.capabilities.iter();
                states.map(|(name, state)| json!({ "capability": name, "state": state })).collect()
            }
            "query-status" => {
                let running = script.status == "running";
                json!({ "status": script.status, "running": running, "singlestep": false })
            }
            "query-migrate" => match script.migration {
                Some(status) => json!({ "status": status }),
                None => json!({}),
            },
            "query-chardev" => json!([{ "label": "card", "filename": "disconnected:unix:/run/card" }]),
            "query-uuid" => json!({ "UUID": "00000000-0000-0000-0000-000000000000" }),
            "query-named-block-nodes" => json!([{ "node-name": "disk" }, { "node-name": "file" }]),
            "migrate-set-capabilities" => {
                for state in arguments["capabilities"].as_array().into_iter().flatten() {
                    let name = state["capability"].as_str().unwrap().to_owned();
                    script.capabilities.insert(name, state["state"] == true);
                }
                json!({})
            }
            "migrate_cancel" => {
                script.migration = Some("cancelled");
                json!({})
            }
            "block-export-add" => return Err(CommandError::generic("NBD server not running")),
            "device_add" if script.refused_devices > 0 => {
                script.refused_devices -= 1;
                return Err(CommandError::generic("chardev 'vsock' is already in use"));
            }
            "cont" => match script.cont {
                Some(status) => {
                    script.status = status;
                    json!({})
                }
                None => return Err(CommandError::generic("Failed to get \"write\" lock")),
            },
            "query-cpus-fast" => {
                let vcpus = script.vcpus.iter().enumerate();
                vcpus
                    .map(|(index, id)| json!({ "cpu-index": index, "thread-id": id, "qom-path": "/c", "target": "x86_64" }))
                    .collect()
            }
            "query-yank" if script.keeps_migration => json!([{ "type": "migration" }]),
            "query-yank" => json!([]),
            _ => json!({}),
        })
    }
}
