//! Recorded command lines that were made to do harm.
#![allow(clippy::unwrap_used, reason = "a helper that fails is a test that fails")]

pub mod harness;

use proptest::prelude::*;
use serde_json::json;
use towline_launch::{HostArguments, ParseError, Recorded, RefusalReason, Refused};

fn manifest(option: &str, value: Option<&str>) -> Result<Recorded, ParseError> {
    let option = match value {
        Some(value) => json!({ "option": option, "value": value }),
        None => json!({ "option": option }),
    };
    let machine = json!({ "option": "machine", "value": "q35" });
    Recorded::from_json(json!({ "version": 1, "options": [machine, option] }).to_string().as_bytes())
}

/// Fails unless the option is refused under this key for this reason.
#[track_caller]
fn assert_refused(option: &str, value: Option<&str>, key: &str, reason: &RefusalReason) {
    let recorded = manifest(option, value).unwrap();
    harness::check_recorded(&recorded);
    let consoles = HostArguments { console_directory: Some("/run/a".into()), ..HostArguments::default() };
    for host in [HostArguments::default(), consoles] {
        match recorded.allow(&host) {
            Err(Refused::Image(refusals)) => {
                let found =
                    refusals.iter().any(|refusal| refusal.setting == key && refusal.reason == *reason);
                assert!(found, "{option} {value:?}: {refusals:?}");
                let text = Refused::Image(refusals).to_string();
                assert!(text.contains(key), "{text}");
            }
            other => panic!("{option} {value:?}: {other:?}"),
        }
    }
}

#[test]
fn options_of_the_process_are_refused() {
    for (option, value) in [
        ("incoming", "exec:touch /tmp/owned"),
        ("incoming", "defer"),
        ("monitor", "stdio"),
        ("monitor", "unix:/tmp/owned,server=on"),
        ("qmp", "tcp:0.0.0.0:4444,server=on,wait=off"),
        ("mon", "chardev=c0"),
        ("gdb", "tcp::1234"),
        ("L", "/tmp"),
        ("D", "/etc/cron.d/owned"),
        ("d", "exec"),
        ("trace", "file=/etc/cron.d/owned"),
        ("pidfile", "/etc/nologin"),
        ("runas", "root"),
        ("run-with", "user=root"),
        ("chroot", "/"),
        ("sandbox", "off"),
        ("sandbox", "on,elevateprivileges=allow"),
        ("vnc", "0.0.0.0:0"),
        ("spice", "port=5900,disable-ticketing=on"),
        ("display", "gtk"),
        ("display", "none,show-cursor=on"),
        ("display", "egl-headless,rendernode=/dev/dri/renderD128"),
        ("qtest", "unix:/tmp/owned"),
        ("add-fd", "fd=3,set=1"),
        ("overcommit", "mem-lock=on"),
    ] {
        assert_refused(option, Some(value), option, &RefusalReason::Process);
    }
    for option in ["daemonize", "s", "S", "preconfig"] {
        assert_refused(option, None, option, &RefusalReason::Process);
    }
    for option in ["snapshot", "nographic"] {
        assert_refused(option, None, option, &RefusalReason::Host);
    }
}

#[test]
fn options_that_no_image_may_have_are_refused() {
    for (option, value) in [
        ("readconfig", "/tmp/owned.cfg"),
        ("writeconfig", "/etc/nologin"),
        ("plugin", "file=/tmp/owned.so"),
        ("set", "device.net0.romfile=/etc/shadow"),
        ("fsdev", "local,path=/,security_model=none"),
        ("virtfs", "local,path=/,mount_tag=root,security_model=none"),
        ("loadvm", "owned"),
        ("dump-vmstate", "/etc/nologin"),
        ("semihosting-config", "enable=on,target=native"),
        ("iscsi", "initiator-name=iqn.2026"),
        ("compat", "deprecated-input=crash"),
        ("xen-domid", "0"),
        ("prom-env", "a=b"),
    ] {
        assert_refused(option, Some(value), option, &RefusalReason::Option);
    }
}

#[test]
fn options_that_name_files_are_refused() {
    for (option, value) in [
        ("bios", "/tmp/owned.bin"),
        ("bios", "owned.bin"),
        ("kernel", "/etc/shadow"),
        ("initrd", "/etc/shadow"),
        ("dtb", "/etc/shadow"),
        ("option-rom", "/etc/shadow"),
        ("acpitable", "data=/etc/shadow"),
        ("fw_cfg", "name=opt/a,file=/etc/shadow"),
        ("hda", "json:{\"driver\":\"ssh\",\"host\":\"h\"}"),
        ("cdrom", "http://169.254.169.254/latest"),
        ("pflash", "ssh://root@host/a"),
        ("sd", "fat:rw:/etc"),
        ("mem-path", "/etc"),
        ("debugcon", "file:/etc/nologin"),
        ("(disk file)", "/dev/sda"),
    ] {
        assert_refused(option, Some(value), option, &RefusalReason::Host);
    }
}

#[test]
fn properties_that_name_something_of_the_host_are_refused() {
    for (option, value, key) in [
        ("drive", "file=/etc/shadow,id=d,if=none", "drive.d.file"),
        ("drive", "file=json:{\"driver\":\"file\"},id=d", "drive.d.file"),
        ("drive", "file=ssh://root@host/a,id=d", "drive.d.file"),
        ("drive", "id=d,format=qcow2", "drive.d.format"),
        ("drive", "id=d,file.filename=/etc/shadow", "drive.d.file.filename"),
        ("drive", "id=d,file=a,,file=/etc/shadow", "drive.d.file"),
        ("blockdev", "driver=file,filename=/etc/shadow,node-name=b", "blockdev.b.filename"),
        (
            "blockdev",
            "{\"driver\":\"host_device\",\"filename\":\"/dev/sda\",\"node-name\":\"b\"}",
            "blockdev.b.filename",
        ),
        ("netdev", "tap,id=n", "netdev.n.ifname"),
        ("netdev", "tap,id=n,script=no,downscript=no", "netdev.n.ifname"),
        ("netdev", "{\"type\":\"tap\",\"id\":\"n\"}", "netdev.n.ifname"),
        ("netdev", "tap,id=n,ifname=tap0", "netdev.n.ifname"),
        ("name", "guest=a,process=sshd", "name.process"),
        ("netdev", "tap,id=n,fd=3", "netdev.n.fd"),
        ("netdev", "tap,id=n,helper=/tmp/owned", "netdev.n.helper"),
        ("netdev", "user,id=n,smb=/", "netdev.n.smb"),
        ("netdev", "user,id=n,tftp=/etc", "netdev.n.tftp"),
        ("netdev", "user,id=n,hostfwd=tcp::22-:22", "netdev.n.hostfwd"),
        ("netdev", "user,id=n,guestfwd=tcp:10.0.2.9:1-cmd:/bin/sh", "netdev.n.guestfwd"),
        ("netdev", "{\"type\":\"user\",\"id\":\"n\",\"smb\":\"/\"}", "netdev.n.smb"),
        ("object", "memory-backend-file,id=m,size=1G,mem-path=/dev/sda", "object.m.mem-path"),
        ("object", "rng-random,id=r,filename=/dev/mem", "object.r.filename"),
        ("device", "vhost-vsock-pci,guest-cid=2", "device.guest-cid"),
        ("smbios", "file=/etc/shadow", "smbios.file"),
        ("boot", "splash=/etc/shadow", "boot.splash"),
    ] {
        assert_refused(option, Some(value), key, &RefusalReason::Host);
    }
}

#[test]
fn types_that_are_not_listed_are_refused() {
    for (option, value, key) in [
        ("device", "vfio-pci,host=01:00.0,id=v", "device.v.driver"),
        ("device", "{\"driver\":\"vfio-pci\",\"host\":\"01:00.0\"}", "device.driver"),
        ("device", "usb-host,hostbus=1,hostaddr=2", "device.driver"),
        ("device", "e1000,driver=vfio-pci", "device.driver"),
        ("device", "loader,file=/etc/shadow", "device.driver"),
        ("device", "virtio-9p-pci,fsdev=f0,mount_tag=a", "device.driver"),
        ("device", "ivshmem-doorbell,chardev=c", "device.driver"),
        ("device", "/e1000", "device.driver"),
        ("object", "secret,id=s,file=/etc/shadow", "object.s.qom-type"),
        ("object", "memory-backend-ram,id=m,qom-type=memory-backend-shm", "object.m.qom-type"),
        (
            "object",
            "{\"qom-type\":\"filter-dump\",\"id\":\"f\",\"file\":\"/etc/nologin\"}",
            "object.f.qom-type",
        ),
        ("object", "can-host-socketcan,id=c,if=can0", "object.c.qom-type"),
        ("object", "input-linux,id=i,evdev=/dev/input/event0", "object.i.qom-type"),
        ("object", "pr-manager-helper,id=p,path=/tmp/owned", "object.p.qom-type"),
        ("chardev", "pipe,id=c,path=/tmp/owned", "chardev.c.backend"),
        ("chardev", "file,id=c,path=/etc/nologin", "chardev.c.backend"),
        ("chardev", "socket,id=c,host=0.0.0.0,port=1,server=on", "chardev.c.backend"),
        ("chardev", "null,id=c,backend=stdio", "chardev.c.backend"),
        ("netdev", "bridge,id=n,br=br0,helper=/tmp/owned", "netdev.n.type"),
        ("netdev", "stream,id=n,addr.type=unix,addr.path=/tmp/owned", "netdev.n.type"),
        ("netdev", "passt,id=n,path=/tmp/owned", "netdev.n.type"),
        ("netdev", "vhost-vdpa,id=n,vhostdev=/dev/vhost-vdpa-0", "netdev.n.type"),
        ("nic", "tap,script=/tmp/owned", "nic.type"),
        ("tpmdev", "passthrough,id=t,path=/dev/tpm0", "tpmdev.t.type"),
        ("audiodev", "wav,id=a,path=/etc/nologin", "audiodev.a.driver"),
        ("numa", "nodes,memdev=m", "numa.type"),
    ] {
        assert_refused(option, Some(value), key, &RefusalReason::Type);
    }
    for machine in ["x-remote", "nitro-enclave", "q35/../x"] {
        assert_refused("machine", Some(machine), "machine.type", &RefusalReason::Type);
    }
}

#[test]
fn properties_that_are_not_listed_are_refused() {
    for (option, value, key) in [
        ("machine", "firmware=/tmp/owned", "machine.firmware"),
        ("machine", "kernel=/etc/shadow", "machine.kernel"),
        ("machine", "dumpdtb=/etc/nologin", "machine.dumpdtb"),
        ("machine", "memory-encryption=sev0", "machine.memory-encryption"),
        ("accel", "kvm,device=/tmp/kvm", "accel.device"),
        ("device", "virtio-net-pci,x-unknown=1", "device.x-unknown"),
        (
            "device",
            "{\"driver\":\"virtio-blk-pci\",\"iothread-vq-mapping\":[{\"iothread\":\"i\"}]}",
            "device.iothread-vq-mapping",
        ),
        (
            "blockdev",
            "{\"driver\":\"raw\",\"node-name\":\"b\",\"file.filename\":\"/etc/shadow\"}",
            "blockdev.b.file.filename",
        ),
        ("m", "1G,mem-path=/etc", "m.mem-path"),
        ("rtc", "base=utc,file=/etc/nologin", "rtc.file"),
        ("name", "guest=a,chroot=/", "name.chroot"),
    ] {
        assert_refused(option, Some(value), key, &RefusalReason::Property);
    }
    for value in
        ["vfio-pci.host=01:00.0", "driver=loader,property=file,value=/etc/shadow", "qemu64-x86_64-cpu.a=b"]
    {
        assert_refused("global", Some(value), "global", &RefusalReason::Property);
    }
}

#[test]
fn values_of_another_form_are_refused() {
    const ID: &str = "an id that does not begin with towline-";
    let forms = [
        ("device", "e1000,romfile=/etc/shadow", "device.romfile", "no value"),
        ("device", "e1000,mac=/etc/shadow", "device.mac", "a MAC address"),
        ("device", "isa-serial,chardev=towline-qmp", "device.chardev", ID),
        ("netdev", "vhost-user,id=n,chardev=towline-qmp", "netdev.n.chardev", ID),
        ("chardev", "null,id=towline-qmp", "chardev.towline-qmp.id", ID),
        ("device", "e1000,netdev=../n", "device.netdev", ID),
        ("device", "{\"driver\":\"e1000\",\"addr\":{\"a\":\"/\"}}", "device.addr", "a PCI slot and function"),
        ("netdev", "tap,id=n,script=/tmp/owned", "netdev.n.script", "no or "),
        ("netdev", "tap,id=n,downscript=/tmp/owned", "netdev.n.downscript", "no or "),
        ("netdev", "user,id=n,net=/etc", "netdev.n.net", "an IP address"),
        ("machine", "pflash0=/etc/shadow", "machine.pflash0", ID),
        ("machine", "accel=/etc", "machine.accel", "kvm or tcg or kvm:tcg or tcg:kvm"),
        ("accel", "xen", "accel.accel", "kvm or tcg"),
        ("object", "iothread,id=i/..", "object.id", ID),
        ("drive", "id=d,cache=/etc", "drive.d.cache", "none or writeback or directsync or writethrough"),
        ("name", "guest=/etc", "name.guest", "letters, digits and -_.+"),
        ("smbios", "type=1,product=/etc", "smbios.product", "letters, digits, blanks and -_.+()"),
        ("uuid", "/etc/shadow", "uuid", "a UUID"),
        ("vga", "/etc", "vga", "none or std or cirrus or vmware or qxl or virtio"),
        ("usbdevice", "disk:/etc/shadow", "usbdevice", "tablet or mouse or keyboard"),
        ("parallel", "file:/etc/nologin", "parallel", "none or null"),
        ("cpu", "max,/etc=on", "cpu", "a CPU model and its features"),
        ("cpu", "/etc", "cpu", "a CPU model and its features"),
        ("global", "e1000.romfile=/etc/shadow", "global", "no value"),
        ("rtc", "base=/etc", "rtc.base", "a date, utc or localtime"),
    ];
    for (option, value, key, expected) in forms {
        assert_refused(option, Some(value), key, &RefusalReason::Form { expected: expected.into() });
    }
}

#[test]
fn repeated_keys_and_ids_are_refused() {
    for (option, value, key) in [
        ("device", "e1000,id=n,mac=52:54:00:00:00:01,mac=52:54:00:00:00:02", "device.n.mac"),
        ("device", "e1000,driver=e1000", "device.driver"),
        ("object", "iothread,id=a,id=b", "object.b.id"),
        ("m", "1G,size=2G", "m.size"),
    ] {
        assert_refused(option, Some(value), key, &RefusalReason::Repeated);
    }
    let option = |value: &str| json!({ "option": "chardev", "value": value });
    let json = json!({ "version": 1, "options": [option("null,id=c"), option("ringbuf,id=c")] });
    let recorded = Recorded::from_json(json.to_string().as_bytes()).unwrap();
    let Err(Refused::Image(refusals)) = recorded.allow(&HostArguments::default()) else { panic!("allowed") };
    assert_eq!(refusals.len(), 1);
    assert_eq!(
        (refusals[0].setting.as_str(), &refusals[0].reason),
        ("chardev.c", &RefusalReason::DuplicateId)
    );
}

#[test]
fn malformed_manifests_are_errors() {
    for (option, value, expected) in [
        (
            "machi",
            Some("q35"),
            "option machi is not known: expected one of QEMU 7.2 to 11.1; start QEMU without it",
        ),
        (
            "-machine",
            Some("q35"),
            "option -machine is not known: expected one of QEMU 7.2 to 11.1; start QEMU without it",
        ),
        ("machine", None, "-machine has no value; add it"),
        ("daemonize", Some("/etc"), "-daemonize has a value, expected a flag; remove the value"),
        (
            "(disk file)",
            Some("-daemonize"),
            "option -daemonize is not known: expected one of QEMU 7.2 to 11.1; start QEMU without it",
        ),
        ("append", Some("a\0-daemonize"), "value of -append has a control character; remove it"),
        (
            "device",
            Some("e1000,a b=c"),
            "value of -device is malformed: key \"a b\", expected up to 128 letters, digits, '-', '_', \
                                         '.', '/' or '+'",
        ),
        (
            "device",
            Some("{\"driver\":"),
            "value of -device is malformed: not a JSON object: EOF while parsing a value at line 1 column 10",
        ),
    ] {
        assert_eq!(manifest(option, value).unwrap_err().to_string(), expected);
    }
    let long = "a".repeat(1 << 20);
    assert!(matches!(manifest("append", Some(&long)), Err(ParseError::TooLong { .. })));
    assert!(matches!(manifest("append", Some(&long[..20_000])), Err(ParseError::ValueTooLong { .. })));
    let deep = format!("{{\"a\":{}1{}}}", "[".repeat(500), "]".repeat(500));
    assert!(matches!(manifest("device", Some(&deep)), Err(ParseError::Value { .. })));
    assert!(matches!(Recorded::from_json(b"\xff\xfe{}"), Err(ParseError::Recorded { .. })));
}

#[test]
fn every_seed_is_evaluated() {
    let directory = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/seeds/command_line");
    let mut count = 0;
    for entry in std::fs::read_dir(directory).expect("the seeds are in the repository") {
        let bytes = std::fs::read(entry.unwrap().path()).unwrap();
        harness::command_line(&bytes);
        // Any part of them, too.
        (0..bytes.len()).step_by(11).for_each(|end| harness::command_line(&bytes[..end]));
        count += 1;
    }
    assert!(count >= 4, "{count}");
}

/// Options that are allowed.
const OPTIONS: &[(&str, &str)] = &[
    ("machine", "pc-q35-10.0,smm=off"),
    ("accel", "tcg,thread=multi"),
    ("cpu", "Nehalem,+avx"),
    ("m", "1G"),
    ("object", "memory-backend-ram,size=1G"),
    ("object", "{\"qom-type\":\"iothread\"}"),
    ("device", "virtio-net-pci,mac=52:54:00:00:00:01"),
    ("device", "{\"driver\":\"virtio-blk-pci\",\"bootindex\":1}"),
    ("netdev", "user,restrict=on"),
    ("netdev", "tap,vhost=off"),
    ("netdev", "hubport,hubid=1"),
    ("chardev", "null"),
    ("drive", "if=none,cache=none"),
    ("blockdev", "read-only=on"),
    ("serial", "none"),
    ("global", "ICH9-LPC.disable_s3=1"),
    ("rtc", "base=utc"),
    ("smbios", "type=1,product=a"),
    ("name", "guest=a"),
];
/// Keys that are added to them.
const KEYS: &[&str] = &[
    "file",
    "filename",
    "path",
    "id",
    "romfile",
    "script",
    "ifname",
    "mem-path",
    "net",
    "driver",
    "type",
    "backend",
    "qom-type",
    "node-name",
    "netdev",
    "bus",
    "addr",
    "serial",
    "smb",
    "guestfwd",
    "value",
    "host",
    "fd",
    "size",
    "accel",
];
/// Values of these keys.
const VALUES: &[&str] = &[
    "/MARK",
    "MARK",
    "exec:MARK",
    "unix:/MARK",
    "json:{}",
    "a,,file=/MARK",
    "10.0.2.0/24",
    "../MARK",
    "file:/MARK",
    "\\\\MARK",
    "virtio-net-pci",
    "none",
    "on",
    "1",
];

/// Options that are allowed, some of which become something else.
fn options() -> impl Strategy<Value = (String, String)> {
    let (option, key, value) =
        (prop::sample::select(OPTIONS), prop::sample::select(KEYS), prop::sample::select(VALUES));
    (option, prop::option::of((key, value))).prop_map(|((name, value), addition)| {
        let value = match addition {
            Some((key, added)) if value.starts_with('{') => {
                let mut json: serde_json::Value = serde_json::from_str(value).unwrap();
                json[key] = added.into();
                json.to_string()
            }
            Some((key, added)) => format!("{value},{key}={added}"),
            None => value.to_owned(),
        };
        (name.to_owned(), value)
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn no_allowed_argv_names_something_that_the_image_chose(options in prop::collection::vec(options(), 1..4)) {
        let options: Vec<_> = options.into_iter().map(|(option, value)| json!({ "option": option, "value": value })).collect();
        let json = json!({ "version": 1, "options": options }).to_string();
        harness::command_line(json.as_bytes());
    }

    #[test]
    fn any_bytes_are_read_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        harness::command_line(&bytes);
    }
}
