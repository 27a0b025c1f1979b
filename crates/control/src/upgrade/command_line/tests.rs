use super::*;

const MACHINE: &str = "pc-q35-7.2";

fn context(settings: &[Setting], vsocks: Vsocks) -> OldQemuFacts<'_> {
    OldQemuFacts {
        working_directory: Path::new("/srv/vm"),
        version: QemuVersion { major: 10, minor: 0 },
        machine: MACHINE,
        generation_id: Some("324e6eaf-d1d1-4bf6-bf41-b9bb6c91fb87"),
        settings,
        vsocks,
        vsock_chardevs: &[],
        cards: Cards::Refused,
        number: 0x2a,
    }
}

fn rewritten(words: &[&str]) -> Rewritten {
    let old = CommandLine::parse(words).unwrap();
    rewrite(&old, &context(&[], Vsocks::Refused)).unwrap_or_else(|refusals| panic!("{refusals:?}"))
}

fn words(rewritten: &Rewritten) -> Vec<String> {
    let words = rewritten.command_line.to_arguments().into_iter();
    words.map(|word| word.into_string().unwrap()).collect()
}

/// Keys that are refused.
fn refused(words: &[&str], settings: &[&str], vsocks: Vsocks) -> Vec<String> {
    let settings: Vec<Setting> = settings.iter().map(|text| text.parse().unwrap()).collect();
    match rewrite(&CommandLine::parse(words).unwrap(), &context(&settings, vsocks)) {
        Ok(_) => Vec::new(),
        Err(refusals) => refusals.into_iter().map(|refusal| refusal.setting).collect(),
    }
}

#[test]
fn the_machine_type_is_the_guests_own() {
    assert_eq!(
        words(&rewritten(&["-machine", "q35,memory-backend=mem"])),
        ["-machine", "pc-q35-7.2,memory-backend=mem"]
    );
    assert_eq!(words(&rewritten(&["-M", "accel=kvm"])), ["-machine", "accel=kvm,type=pc-q35-7.2"]);
    assert_eq!(words(&rewritten(&["-S"])), ["-machine", "pc-q35-7.2"]);
}

#[test]
fn sockets_get_staging_names_beside_their_own_and_do_not_wait() {
    let made = rewritten(&[
        "-qmp",
        "unix:a.qmp,server",
        "-chardev",
        "socket,id=agent,path=/run/vm/agent,server,nowait",
        "-serial",
        "mon:unix:/run/vm/serial,server=on",
        "-pidfile",
        "/run/vm/pid",
    ]);
    let expected = [
        "-qmp",
        "unix:/srv/vm/.a.qmp.towline-0000002a,server,wait=off",
        "-chardev",
        "socket,id=agent,path=/run/vm/.agent.towline-0000002a,server,wait=off",
        "-serial",
        "mon:unix:/run/vm/.serial.towline-0000002a,server=on,wait=off",
        "-pidfile",
        "/run/vm/.pid.towline-0000002a",
        "-machine",
        MACHINE,
    ];
    assert_eq!(words(&made), expected);
    let targets: Vec<_> = made.names.iter().map(|name| name.target.to_str().unwrap()).collect();
    assert_eq!(targets, ["/srv/vm/a.qmp", "/run/vm/agent", "/run/vm/serial", "/run/vm/pid"]);
    // The next upgrade has the same final names.
    let again = rewrite(&made.command_line, &context(&[], Vsocks::Refused)).unwrap();
    assert_eq!(again.names, made.names);
}

#[test]
fn files_of_consoles_are_appended_to() {
    let made = rewritten(&["-serial", "file:/var/log/a,b", "-chardev", "file,id=c,path=/var/log/c"]);
    let expected = [
        "-serial",
        "chardev:towline-port42-0",
        "-chardev",
        "file,id=c,path=/var/log/c,append=on",
        "-chardev",
        "file,id=towline-port42-0,path=/var/log/a,,b,append=on",
        "-machine",
        MACHINE,
    ];
    assert_eq!(words(&made), expected);
}

#[test]
fn options_of_the_process_are_left_out() {
    let made = rewritten(&[
        "-chardev",
        "socket,id=towline-qmp,fd=5,server=on,wait=off",
        "-mon",
        "chardev=towline-qmp,mode=control",
        "-monitor",
        "none",
        "-incoming",
        "defer",
        "-S",
        "-daemonize",
        "-name",
        "guest=web,debug-threads=on",
        "-device",
        "vmgenid,guid=auto",
    ]);
    let expected = [
        "-monitor",
        "none",
        "-device",
        "vmgenid,guid=324e6eaf-d1d1-4bf6-bf41-b9bb6c91fb87",
        "-machine",
        MACHINE,
    ];
    assert_eq!(words(&made), expected);
    assert_eq!(made.name.as_deref(), Some("web,debug-threads=on"));
}

/// Each with the setting that changes it.
#[test]
fn what_two_qemus_cannot_have_is_refused_by_its_setting() {
    for (line, key) in [
        ("-netdev tap,id=n0,ifname=tap0,script=no", "netdev.n0"),
        ("-netdev tap,id=n0,fd=7", "netdev.n0"),
        ("-netdev vhost-user,id=n0,chardev=c", "netdev.n0"),
        ("-netdev bridge,id=n0,br=br0", "netdev.n0"),
        ("-netdev user,id=n0,hostfwd=tcp::2222-:22", "netdev.n0.hostfwd"),
        ("-nic tap", "nic"),
        ("-vnc :1", "vnc"),
        ("-display gtk", "display"),
        ("-nographic", "nographic"),
        ("-spice port=5900", "spice"),
        ("-monitor tcp:127.0.0.1:4444,server", "monitor"),
        ("-monitor stdio", "monitor"),
        ("-qmp tcp:127.0.0.1:4444,server", "qmp"),
        ("-serial pty", "serial"),
        ("-serial unix:/run/a", "serial"),
        ("-chardev socket,id=c,path=/run/a", "chardev.c"),
        ("-chardev socket,id=c,port=4,server=on", "chardev.c"),
        ("-chardev socket,id=c,fd=4", "chardev.c"),
        ("-chardev pipe,id=c,path=/run/a", "chardev.c"),
        ("-gdb tcp::1234", "gdb"),
        ("-s", "s"),
        ("-device vfio-pci,host=01:00.0,id=v", "device.v"),
        ("-device usb-host,id=v", "device.v"),
        ("-device vhost-vsock-pci,id=v,guest-cid=3", "device.v"),
        ("-device vhost-user-vsock-pci,id=v,chardev=c", "device.v"),
        ("-device some-new-device,id=v", "device.v"),
        ("-object filter-dump,id=f,netdev=n0,file=x", "object.f"),
        ("-drive file=a,id=d,snapshot=on", "drive.d.snapshot"),
        ("-drive file=/dev/fdset/1,id=d", "drive.d"),
        ("-snapshot", "snapshot"),
        ("-add-fd fd=3,set=1", "add-fd"),
        ("-readconfig /etc/vm", "readconfig"),
        ("-plugin /lib/a.so", "plugin"),
        ("-tpmdev emulator,id=t,chardev=c", "tpmdev.t"),
        ("-virtfs local,path=/,mount_tag=a,security_model=none", "virtfs"),
        ("-D /var/log/qemu", "D"),
    ] {
        let words: Vec<&str> = line.split(' ').collect();
        assert_eq!(refused(&words, &[], Vsocks::Refused), [key], "{line}");
        // The user's own value is not judged.
        let setting = format!("{key}=x");
        assert_eq!(refused(&words, &[&setting], Vsocks::Refused), [""; 0], "{line}");
    }
}

#[test]
fn a_vsock_that_is_detached_keeps_its_chardev() {
    let line = ["-chardev", "socket,id=c,path=/run/v", "-device", "vhost-user-vsock-pci,id=v,chardev=c"];
    let old = CommandLine::parse(line).unwrap();
    let made = rewrite(&old, &context(&[], Vsocks::Detached)).unwrap();
    assert_eq!(words(&made), ["-chardev", "socket,id=c,path=/run/v", "-machine", MACHINE]);
    // One that was plugged in since.
    let chardevs = ["c".to_owned()];
    let context = OldQemuFacts { vsock_chardevs: &chardevs, ..context(&[], Vsocks::Detached) };
    let made = rewrite(&CommandLine::parse(&line[..2]).unwrap(), &context).unwrap();
    assert_eq!(words(&made), ["-chardev", "socket,id=c,path=/run/v", "-machine", MACHINE]);
}

#[test]
fn cards_keep_their_sockets_on_request() {
    let line =
        ["-chardev", "socket,id=c,path=net.sock,reconnect-ms=1000", "-netdev", "vhost-user,id=n0,chardev=c"];
    assert_eq!(refused(&line, &[], Vsocks::Refused), ["netdev.n0"]);
    let shared = OldQemuFacts { cards: Cards::Shared, ..context(&[], Vsocks::Refused) };
    let made = rewrite(&CommandLine::parse(line).unwrap(), &shared).unwrap();
    assert_eq!(words(&made), [&line[..], &["-machine", MACHINE]].concat());
    let card = SharedCard { chardev: "c".into(), socket: "/srv/vm/net.sock".into() };
    assert_eq!(made.cards, [card]);
    // QEMU listens for its card, or does not know its path.
    for chardev in ["socket,id=c,path=/run/n,server=on,wait=off", "socket,id=c,host=::1,port=1"] {
        let line = ["-chardev", chardev, "-netdev", "vhost-user,id=n0,chardev=c"];
        let refusals = rewrite(&CommandLine::parse(line).unwrap(), &shared).unwrap_err();
        let keys: Vec<_> = refusals.into_iter().map(|refusal| refusal.setting).collect();
        assert_eq!(keys, ["chardev.c"]);
    }
}

/// QEMU 9.2 has milliseconds, and QEMU 11 no seconds any more.
#[test]
fn a_chardev_connects_again_by_the_property_that_the_new_qemu_has() {
    let rewritten_for = |version, chardev: &str| {
        let old = CommandLine::parse(["-chardev", chardev, "-netdev", "vhost-user,id=n0,chardev=c"]).unwrap();
        let context = OldQemuFacts { version, cards: Cards::Shared, ..context(&[], Vsocks::Refused) };
        words(&rewrite(&old, &context).unwrap())[1].to_owned()
    };
    let [old, new] = [(9, 1), (9, 2)].map(|(major, minor)| QemuVersion { major, minor });
    for (version, from, to) in [
        (new, "reconnect=2", "reconnect-ms=2000"),
        (new, "reconnect-ms=1500", "reconnect-ms=1500"),
        (old, "reconnect-ms=1500", "reconnect=2"),
        (old, "reconnect=2", "reconnect=2"),
    ] {
        let chardev = |reconnect| format!("socket,id=c,path=/run/c,{reconnect}");
        assert_eq!(rewritten_for(version, &chardev(from)), chardev(to), "{version}");
    }
}

#[test]
fn a_path_that_becomes_too_long_is_refused() {
    let path = format!("unix:/run/{}/a,server=on,wait=off", "x".repeat(90));
    assert_eq!(refused(&["-qmp", &path], &[], Vsocks::Refused), ["qmp"]);
}

/// Their parent is towline, which exits.
#[test]
fn the_new_qemu_does_not_end_with_towline() {
    let made = rewritten(&[
        "-run-with",
        "async-teardown=on,exit-with-parent=on",
        "-run-with",
        "exit-with-parent=on",
    ]);
    assert_eq!(words(&made), ["-run-with", "async-teardown=on", "-machine", MACHINE]);
    let of_user = |value: &str| {
        let line = CommandLine::parse(["-run-with", &format!("exit-with-parent={value}")]).unwrap();
        refuse_end_with_parent(&line).map(|refusal| refusal.setting)
    };
    assert_eq!(of_user("on").as_deref(), Some("run-with.exit-with-parent"));
    assert_eq!(of_user("off"), None);
}

#[test]
fn logs_of_consoles_are_appended_to() {
    let made = rewritten(&[
        "-chardev",
        "null,id=n,logfile=/var/log/n",
        "-chardev",
        "socket,id=c,path=/run/c,server=on,wait=off,logfile=/var/log/c,logappend=off",
        "-serial",
        "unix:/run/s,server=on,telnet=on,logfile=/var/log/s,logappend=off",
    ]);
    let expected = [
        "-chardev",
        "null,id=n,logfile=/var/log/n,logappend=on",
        "-chardev",
        "socket,id=c,path=/run/.c.towline-0000002a,server=on,wait=off,logfile=/var/log/c,logappend=on",
        "-serial",
        "unix:/run/.s.towline-0000002a,server=on,telnet=on,logfile=/var/log/s,logappend=on,wait=off",
        "-machine",
        MACHINE,
    ];
    assert_eq!(words(&made), expected);
    assert_eq!(refused(&["-trace", "enable=kvm*,file=/var/log/t"], &[], Vsocks::Refused), ["trace"]);
}

/// Where a daemon was started is not known.
#[test]
fn relative_paths_of_a_daemon_are_refused() {
    for (line, key) in [
        ("-daemonize -qmp unix:a.qmp,server=on,wait=off", "qmp"),
        ("-daemonize -pidfile pid", "pidfile"),
        ("-daemonize -serial file:log", "serial"),
        ("-daemonize -chardev file,id=c,path=log", "chardev.c"),
        ("-daemonize -chardev null,id=c,logfile=log", "chardev.c"),
        ("-daemonize -drive file=disk.raw,id=d0", "drive.d0.file"),
        ("-daemonize -blockdev driver=file,node-name=f0,filename=disk.raw", "blockdev.f0.filename"),
        ("-daemonize -cdrom disk.iso", "cdrom"),
        ("-daemonize -kernel vmlinuz", "kernel"),
        ("-daemonize disk.raw", "(disk file)"),
        ("-icount shift=7,rr=record,rrfile=/tmp/r", "icount"),
    ] {
        let words: Vec<&str> = line.split(' ').collect();
        assert_eq!(refused(&words, &[], Vsocks::Refused), [key], "{line}");
        assert_eq!(refused(&words[1..], &[], Vsocks::Refused), [""; 0], "{line}");
    }
    assert_eq!(refused(&["-daemonize", "-pidfile", "/run/pid"], &[], Vsocks::Refused), [""; 0]);
    for drive in ["file=/srv/disk.raw,id=d0", "file=nbd://host/disk,id=d0", "id=d0,if=none"] {
        assert_eq!(refused(&["-daemonize", "-drive", drive], &[], Vsocks::Refused), [""; 0], "{drive}");
    }
    let set = ["drive.d0.file=/srv/disk.raw"];
    assert_eq!(refused(&["-daemonize", "-drive", "file=disk.raw,id=d0"], &set, Vsocks::Refused), [""; 0]);
}

/// A property that is set does not leave the rest of its option as the old QEMU has it.
#[test]
fn only_the_property_that_is_set_is_the_users() {
    let made = |line: &[&str], setting: &str| {
        let settings = [setting.parse().unwrap()];
        let old = CommandLine::parse(line).unwrap();
        let made = rewrite(&old, &context(&settings, Vsocks::Refused)).unwrap();
        (words(&made)[1].clone(), made.names.len())
    };
    let socket = ["-chardev", "socket,id=c,path=/run/c,server=on,wait=off"];
    let staged = "socket,id=c,path=/run/.c.towline-0000002a,server=on,wait=off".to_owned();
    assert_eq!(made(&socket, "chardev.c.telnet=off"), (staged.clone(), 1));
    // Another socket, which keeps its name.
    assert_eq!(made(&socket, "chardev.c.path=/run/d").1, 0);
    let generation = ["-device", "vmgenid,id=v,guid=auto"];
    let (word, _) = made(&generation, "device.v.bus=x");
    assert!(word.contains("guid=324e6eaf-d1d1-4bf6-bf41-b9bb6c91fb87"), "{word}");
    // The setting is of the other one, whose id begins alike.
    let both = [socket.as_slice(), &["-chardev", "socket,id=c.x,path=/run/x,server=on,wait=off"]].concat();
    assert_eq!(made(&both, "chardev.c.x.path=/run/y"), (staged, 1));
}

/// Verdicts on each option with values of each kind; before it is that about an image, which `towline_launch`
/// checks.
#[test]
fn each_option_is_rewritten_as_listed() {
    let listed = include_str!("../../../../launch/src/verdicts.txt");
    let mut wrong = Vec::new();
    for line in listed.lines() {
        let [option, _, verdict] = line.split(" => ").collect::<Vec<_>>()[..] else { panic!("{line}") };
        let old = CommandLine::parse(option.split(' ')).unwrap();
        let found = match rewrite(&old, &context(&[], Vsocks::Refused)) {
            Ok(made) => words(&made).join(" "),
            Err(refusals) => {
                let refusals: Vec<_> = refusals.iter().map(ToString::to_string).collect();
                refusals.join("; ")
            }
        };
        if found != verdict {
            wrong.push(format!("{option} => {found}"));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}
