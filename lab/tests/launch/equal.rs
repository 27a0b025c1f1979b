//! A command line that is read from a process, recorded, allowed and started again gives an equal QEMU.

use std::collections::BTreeMap;

use serde_json::{Value, json};
use towline_lab::{Qmp, Version};
use towline_launch::{CommandLine, Recorded, Setting};

use crate::support::{Place, VERSIONS, WITHIN, command_line, versions};

/// Objects of the tree that are compared at most.
const OBJECTS_MAX: usize = 5000;

/// Paths, types and properties of the objects of a QEMU, and its memory.
#[derive(Debug, PartialEq)]
struct Shape {
    objects: BTreeMap<String, Vec<(String, String)>>,
    memory: Value,
    cpus: Value,
}

fn shape(monitor: &Qmp) -> Shape {
    let mut objects = BTreeMap::new();
    let mut paths = vec!["/machine".to_owned(), "/objects".to_owned()];
    while let Some(path) = paths.pop() {
        let listed = monitor.execute("qom-list", json!({ "path": path })).unwrap();
        let mut properties = Vec::new();
        for property in listed.as_array().unwrap() {
            let (name, kind) = (property["name"].as_str().unwrap(), property["type"].as_str().unwrap());
            if kind.starts_with("child<") {
                paths.push(format!("{path}/{name}"));
            }
            properties.push((name.to_owned(), kind.to_owned()));
        }
        properties.sort();
        objects.insert(path, properties);
        assert!(objects.len() < OBJECTS_MAX);
    }
    let memory = monitor.execute("query-memdev", Value::Null).unwrap();
    let cpus = monitor.execute("query-hotpluggable-cpus", Value::Null).unwrap();
    Shape { objects, memory, cpus }
}

fn arguments(version: Version, disk: &str) -> Vec<String> {
    let drive = format!("file={disk},if=none,id=disk0,format=raw,cache=writeback");
    let arguments = [
        "-machine",
        &format!("{},smm=off", version.machine()),
        "-accel",
        "tcg,thread=multi",
        "-cpu",
        "Nehalem,-vmx",
        "-m",
        "128M,slots=2,maxmem=512M",
        "-smp",
        "2,sockets=2",
        "-object",
        "memory-backend-memfd,id=ram0,size=128M,share=on",
        "-numa",
        "node,nodeid=0,memdev=ram0",
        "-nodefaults",
        "-no-user-config",
        "-object",
        r#"{"qom-type":"iothread","id":"io0"}"#,
        "-device",
        "pcie-root-port,id=pci.1,chassis=1,slot=1",
        "-drive",
        &drive,
        "-device",
        r#"{"driver":"virtio-blk-pci","id":"blk0","drive":"disk0","bus":"pci.1","iothread":"io0","bootindex":1}"#,
        "-netdev",
        "user,id=net0,net=10.9.0.0/24,restrict=on",
        "-device",
        "virtio-net-pci,id=nic0,netdev=net0,mac=52:54:00:12:00:01,romfile=",
        "-device",
        "qemu-xhci,id=usb",
        "-device",
        "usb-tablet,id=tablet",
        "-object",
        "rng-random,id=rng0,filename=/dev/urandom",
        "-device",
        "virtio-rng-pci,rng=rng0",
        "-device",
        "virtio-balloon-pci,id=balloon",
        "-vga",
        "std",
        "-global",
        "ICH9-LPC.disable_s3=1",
        "-serial",
        "null",
        "-boot",
        "order=c,menu=off",
        "-rtc",
        "base=utc",
        "-uuid",
        "6b5f1c1e-6a0d-4a6c-9a3f-0d2f4a8b7c11",
        "-smbios",
        "type=1,manufacturer=Towline,product=Lab guest",
        "-name",
        "guest=origin,debug-threads=on",
        "-S",
    ];
    arguments.map(str::to_owned).to_vec()
}

#[test]
fn a_recorded_command_line_starts_an_equal_qemu() {
    for version in versions("a_recorded_command_line_starts_an_equal_qemu", &VERSIONS) {
        let place = Place::new(version);
        let disk = place.path("disk,0.raw");
        std::fs::write(&disk, vec![0; 1 << 20]).unwrap();
        let escaped = disk.to_str().unwrap().replace(',', ",,");
        let arguments = arguments(version, &escaped);
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        let mut launcher = place.launcher("first");
        launcher.is_paused = true;
        let first = place.start(launcher, &arguments).unwrap();
        let recorded = command_line(first.pid()).record().unwrap();
        let json = recorded.to_json();
        assert!(!json.contains("towline-qmp") && !json.contains("sandbox"), "{json}");
        let first_shape = shape(&Qmp::connect(&first.qmp_path(), WITHIN).unwrap());
        drop(first);
        assert!(
            first_shape.objects.contains_key("/machine/peripheral/nic0"),
            "{:?}",
            first_shape.objects.keys()
        );

        let mut launcher = place.launcher("second");
        launcher.is_paused = true;
        let mut host = place.host();
        let setting = |key: &str, value: &str| Setting { key: key.into(), value: value.into() };
        host.settings = vec![
            setting("drive.disk0.file", disk.to_str().unwrap()),
            setting("drive.disk0.format", "raw"),
            setting("object.rng0.filename", "/dev/urandom"),
        ];
        let allowed = Recorded::from_json(json.as_bytes()).unwrap().allow(&host).unwrap();
        let second = launcher.start(&allowed, &host).unwrap();
        let monitor = Qmp::connect(&second.qmp_path(), WITHIN).unwrap();
        assert_eq!(shape(&monitor), first_shape);
        assert_eq!(monitor.execute("query-name", Value::Null).unwrap()["name"], "second");
        let again = command_line(second.pid()).record().unwrap();
        // All but the name, which is the guest's own.
        let without_name = |recorded: &Recorded| {
            let options = recorded.command_line().options().iter();
            options
                .filter(|option| !["name", "drive", "display"].contains(&option.name.as_str()))
                .cloned()
                .collect::<Vec<_>>()
        };
        assert_eq!(without_name(&again), without_name(&recorded));
    }
}

#[test]
fn consoles_and_networks_of_an_image_are_bounded() {
    for version in versions("consoles_and_networks_of_an_image_are_bounded", &VERSIONS) {
        let place = Place::new(version);
        let machine = version.machine();
        let words = ["-nodefaults", "-machine", machine, "-accel", "tcg", "-m", "64M", "-serial", "stdio"];
        let network = ["-netdev", "user,id=n0,restrict=off", "-device", "e1000,netdev=n0,romfile="];
        let recorded = CommandLine::parse(words.iter().chain(&network)).unwrap().record().unwrap();
        let mut launcher = place.launcher("bounded");
        launcher.is_paused = true;
        let host = place.host();
        let running = launcher.start(&recorded.allow(&host).unwrap(), &host).unwrap();
        let monitor = Qmp::connect(&running.qmp_path(), WITHIN).unwrap();
        let chardevs = monitor.execute("query-chardev", Value::Null).unwrap();
        let mut found: Vec<_> =
            chardevs.as_array().unwrap().iter().map(|it| it["label"].as_str().unwrap()).collect();
        found.sort_unstable();
        // There is no human monitor.
        assert_eq!(found, ["serial0", "towline-qmp"], "{version:?}: {chardevs}");
        let read = json!({ "device": "serial0", "size": 16 });
        assert_eq!(monitor.execute("ringbuf-read", read).unwrap(), "");
        let info = json!({ "command-line": "info network" });
        let info = monitor.execute("human-monitor-command", info).unwrap();
        assert!(info.as_str().unwrap().contains("restrict=on"), "{info}");
    }
}
