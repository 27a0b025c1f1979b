use super::*;

/// A guest as libvirt starts it, shortened.
const LIBVIRT: &str = "-name guest=web,debug-threads=on -S -machine pc-q35-7.2,usb=off,dump-guest-core=off,memory-backend=pc.ram \
     -accel kvm -cpu Nehalem,vme=on,hypervisor=on -m size=1048576k \
     -object {\"qom-type\":\"memory-backend-memfd\",\"id\":\"pc.ram\",\"share\":true,\"size\":1073741824} \
     -overcommit mem-lock=off -smp 2,sockets=2,cores=1,threads=1 -uuid 6b5f1c1e-6a0d-4a6c-9a3f-0d2f4a8b7c11 -no-user-config \
     -nodefaults -chardev socket,id=charmonitor,fd=21,server=on,wait=off -mon chardev=charmonitor,id=monitor,mode=control \
     -rtc base=utc,driftfix=slew -global kvm-pit.lost_tick_policy=delay -no-shutdown -global ICH9-LPC.disable_s3=1 \
     -boot strict=on -device {\"driver\":\"pcie-root-port\",\"port\":16,\"chassis\":1,\"id\":\"pci.1\",\"bus\":\"pcie.0\",\"multifunction\":true,\"addr\":\"0x2\"} \
     -drive file=/srv/web.qcow2,format=qcow2,if=none,id=disk0,cache=none \
     -device {\"driver\":\"virtio-blk-pci\",\"bus\":\"pci.1\",\"addr\":\"0x0\",\"drive\":\"disk0\",\"bootindex\":1} \
     -netdev tap,fd=24,id=net0,vhost=on,vhostfd=25 -device virtio-net-pci,netdev=net0,id=nic0,mac=52:54:00:00:00:01,romfile= \
     -chardev pty,id=charserial0 -device isa-serial,chardev=charserial0,id=serial0,index=0 -vnc 127.0.0.1:0 -msg timestamp=on";

fn recorded(text: &str) -> Recorded {
    CommandLine::parse(text.split(' ')).unwrap().record().unwrap()
}

fn host(settings: &[&str]) -> HostArguments {
    let settings = settings.iter().map(|text| text.parse().unwrap()).collect();
    HostArguments { settings, console_directory: Some("/run/towline/web".into()), ..HostArguments::default() }
}

fn words(allowed: &AllowedCommandLine) -> String {
    let words: Vec<_> = allowed.to_arguments().into_iter().map(|word| word.into_string().unwrap()).collect();
    words.join(" ")
}

fn refusals(text: &str, host: &HostArguments) -> Vec<(String, RefusalReason)> {
    match recorded(text).allow(host).unwrap_err() {
        Refused::Image(refusals) => {
            refusals.into_iter().map(|refusal| (refusal.setting, refusal.reason)).collect()
        }
        other => panic!("{other}"),
    }
}

#[test]
fn an_images_files_and_descriptors_come_from_this_host() {
    let wanted = ["drive.disk0.file", "drive.disk0.format", "netdev.net0.fd", "netdev.net0.vhostfd"];
    let mut wanted: Vec<_> = wanted.iter().map(|key| ((*key).to_owned(), RefusalReason::Host)).collect();
    wanted.insert(3, ("netdev.net0.vhost".to_owned(), off()));
    assert_eq!(refusals(LIBVIRT, &host(&[])), wanted);
}

#[test]
fn with_values_of_this_host_the_guest_is_allowed() {
    let host = host(&[
        "drive.disk0.file=/vm/a,b.qcow2",
        "drive.disk0.format=qcow2",
        "netdev.net0=tap,ifname=tap0,script=no,downscript=no",
    ]);
    let allowed = words(&recorded(LIBVIRT).allow(&host).unwrap());
    let wanted = "-name web,debug-threads=on -machine pc-q35-7.2,usb=off,dump-guest-core=off,memory-backend=pc.ram -accel kvm \
         -cpu Nehalem,vme=on,hypervisor=on -m 1048576k \
         -object {\"id\":\"pc.ram\",\"qom-type\":\"memory-backend-memfd\",\"share\":true,\"size\":1073741824} \
         -smp 2,sockets=2,cores=1,threads=1 -uuid 6b5f1c1e-6a0d-4a6c-9a3f-0d2f4a8b7c11 -no-user-config -nodefaults \
         -rtc base=utc,driftfix=slew -global kvm-pit.lost_tick_policy=delay -no-shutdown -global ICH9-LPC.disable_s3=1 \
         -boot strict=on -device {\"addr\":\"0x2\",\"bus\":\"pcie.0\",\"chassis\":1,\"driver\":\"pcie-root-port\",\"id\":\"pci.1\",\"multifunction\":true,\"port\":16} \
         -drive file=/vm/a,,b.qcow2,format=qcow2,if=none,id=disk0,cache=none \
         -device {\"addr\":\"0x0\",\"bootindex\":1,\"bus\":\"pci.1\",\"drive\":\"disk0\",\"driver\":\"virtio-blk-pci\"} \
         -netdev tap,ifname=tap0,script=no,downscript=no,id=net0 -device virtio-net-pci,netdev=net0,id=nic0,mac=52:54:00:00:00:01,romfile= \
         -chardev file,id=charserial0,path=/run/towline/web/console0.log -device isa-serial,chardev=charserial0,id=serial0,index=0 \
         -display none";
    assert_eq!(allowed, wanted);
}

#[test]
fn a_trusted_command_line_keeps_its_paths_and_not_its_process() {
    let line = CommandLine::parse(LIBVIRT.split(' ')).unwrap();
    let allowed = words(&line.trust(&HostArguments::default()).unwrap());
    assert!(allowed.contains("file=/srv/web.qcow2") && allowed.contains("pty,id=charserial0"), "{allowed}");
    assert!(
        !allowed.contains("charmonitor") && !allowed.contains("-vnc") && allowed.ends_with("-display none"),
        "{allowed}"
    );
    assert_eq!(words(&recorded(LIBVIRT).trust(&HostArguments::default()).unwrap()), allowed);
}

#[test]
fn a_disk_has_its_format_from_this_host() {
    let text = "-drive if=none,id=d0 -device virtio-blk-pci,drive=d0";
    let wanted = [("drive.d0.format".to_owned(), RefusalReason::Format)];
    for setting in ["drive.d0.file=/vm/a", "drive.d0.file.filename=/vm/a", "drive.d0.file.driver=file"] {
        assert_eq!(refusals(text, &host(&[setting])), wanted);
    }
    recorded(text).allow(&host(&["drive.d0.file.filename=/vm/a", "drive.d0.driver=raw"])).unwrap();
    recorded(text).allow(&host(&["drive.d0.file=/vm/a", "drive.d0.format=raw"])).unwrap();
}

#[test]
fn a_secret_that_was_left_out_has_to_be_given() {
    let text = "-drive id=d0,if=none,file=https://me:password@host/a";
    assert_eq!(refusals(text, &host(&[])), [("drive.d0.file".to_owned(), RefusalReason::LeftOut)]);
    let host = host(&["drive.d0.file=/vm/a", "drive.d0.format=raw"]);
    assert!(words(&recorded(text).allow(&host).unwrap()).contains("file=/vm/a"));
    let error = recorded(text).trust(&HostArguments::default()).unwrap_err();
    assert!(error.to_string().contains("drive.d0.file: a secret, which is not in the image"), "{error}");
}

#[test]
fn serial_ports_write_to_files_of_this_host() {
    let text = "-serial file:/etc/passwd -serial none -serial stdio -nodefaults";
    let allowed = words(&recorded(text).allow(&host(&[])).unwrap());
    assert_eq!(
        allowed,
        "-serial file:/run/towline/web/serial0.log -serial none -serial file:/run/towline/web/serial2.log -nodefaults \
         -display none"
    );
}

#[test]
fn without_a_directory_consoles_are_ring_buffers() {
    let text = "-nodefaults -serial file:/etc/passwd -serial null -chardev null,id=serial2 -serial stdio \
                -chardev pty,id=c0 -device isa-serial,chardev=c0 -chardev socket,id=c1,path=/a -serial chardev:c1";
    let allowed = recorded(text).allow(&HostArguments::default()).unwrap();
    assert_eq!(
        words(&allowed),
        "-nodefaults -serial chardev:serial0 -serial null -chardev null,id=serial2 -serial chardev:serial2-ring \
         -chardev ringbuf,id=c0,size=64K -device isa-serial,chardev=c0 -chardev ringbuf,id=c1,size=64K -serial chardev:c1 \
         -chardev ringbuf,id=serial0,size=64K -chardev ringbuf,id=serial2-ring,size=64K -display none"
    );
    // A clone's image is allowed unchanged.
    let again = allowed.command_line().record().unwrap().allow(&HostArguments::default()).unwrap();
    assert_eq!(words(&again), words(&allowed).replace(" -display none", "") + " -display none");
    // The launcher's monitor is not a console.
    let refused = refusals(
        "-nodefaults -serial chardev:towline-qmp -device isa-serial,chardev=towline-qmp",
        &host(&[]),
    );
    assert!(refused.iter().any(|(key, _)| key == "device.chardev"), "{refused:?}");
}

fn off() -> RefusalReason {
    RefusalReason::Form { expected: "off, unless this host sets it".into() }
}

#[test]
fn a_tap_is_named_by_this_host_and_runs_no_script() {
    let text = "-netdev tap,id=n0";
    let wanted = [("netdev.n0.ifname".to_owned(), RefusalReason::Host)];
    assert_eq!(refusals(text, &host(&[])), wanted);
    assert_eq!(refusals("-netdev tap,id=n0,script=no", &host(&[])), wanted);
    let with = |text: &str, settings: &[&str]| words(&recorded(text).allow(&host(settings)).unwrap());
    assert_eq!(
        with(text, &["netdev.n0.ifname=tap0"]),
        "-netdev tap,id=n0,ifname=tap0,script=no,downscript=no -display none"
    );
    assert_eq!(
        with(text, &["netdev.n0.ifname=tap0", "netdev.n0.script=/etc/up"]),
        "-netdev tap,id=n0,ifname=tap0,script=/etc/up,downscript=no -display none"
    );
    // QEMU refuses scripts for a tap that is open.
    assert_eq!(
        with("-netdev tap,id=n0,script=no,downscript=no", &["netdev.n0.fd=5"]),
        "-netdev tap,id=n0,fd=5 -display none"
    );
    assert_eq!(
        with(r#"-netdev {"type":"tap","id":"n0"}"#, &["netdev.n0.ifname=tap0"]),
        r#"-netdev {"downscript":"no","id":"n0","ifname":"tap0","script":"no","type":"tap"} -display none"#
    );
}

#[test]
fn vhost_has_the_consent_of_this_host() {
    let text = "-netdev tap,id=n0,vhost=on";
    let wanted = [("netdev.n0.vhost".to_owned(), off())];
    assert_eq!(refusals(text, &host(&["netdev.n0.ifname=tap0"])), wanted);
    assert_eq!(refusals(&text.replace("vhost", "vhostforce"), &host(&["netdev.n0.ifname=tap0"])).len(), 1);
    recorded(text).allow(&host(&["netdev.n0.ifname=tap0", "netdev.n0.vhost=on"])).unwrap();
}

#[test]
fn network_of_qemu_is_isolated_unless_this_host_opens_it() {
    let with = |text: &str, settings: &[&str]| words(&recorded(text).allow(&host(settings)).unwrap());
    for text in
        ["-netdev user,id=n0", "-netdev user,id=n0,restrict=off", "-netdev user,id=n0,restrict=off,ipv6=on"]
    {
        let allowed = with(text, &[]);
        assert!(allowed.contains("restrict=on") && !allowed.contains("restrict=off"), "{allowed}");
        let allowed = with(text, &["netdev.n0.restrict=off"]);
        assert!(allowed.contains("restrict=off") && !allowed.contains("restrict=on"), "{allowed}");
    }
    assert_eq!(with("-net nic -net user", &[]), "-net nic -net user,restrict=on -display none");
    assert_eq!(with("-nic user", &[]), "-nic user,restrict=on -display none");
    let json = r#"-netdev {"type":"user","id":"n0"}"#;
    assert_eq!(with(json, &[]), r#"-netdev {"id":"n0","restrict":true,"type":"user"} -display none"#);
    assert!(with(json, &["netdev.n0.restrict=off"]).contains(r#""restrict":false"#));
    // QEMU's default network has this kind.
    assert_eq!(with("-machine q35", &[]), "-machine q35 -net nic -net user,restrict=on -display none");
    assert_eq!(with("-nodefaults", &[]), "-nodefaults -display none");
}

#[test]
fn accelerator_of_this_host_replaces_the_images() {
    let with = |text: &str, settings: &[&str]| words(&recorded(text).allow(&host(settings)).unwrap());
    let text = "-machine q35,accel=tcg -nodefaults -enable-kvm";
    assert_eq!(with(text, &["accel=kvm"]), "-machine q35 -nodefaults -accel kvm -display none");
    assert_eq!(with(text, &["machine.accel=kvm"]), "-machine q35,accel=kvm -nodefaults -display none");
    assert_eq!(
        with("-nodefaults -accel tcg -accel kvm", &["accel.1.accel=kvm"]),
        "-nodefaults -accel kvm -display none"
    );
    let own = HostArguments { arguments: vec!["-accel".into(), "kvm".into()], ..HostArguments::default() };
    let allowed = words(&recorded("-nodefaults -machine accel=tcg -accel tcg").allow(&own).unwrap());
    assert_eq!(allowed, "-nodefaults -display none -accel kvm");
    assert_eq!(with(text, &[]), "-machine q35,accel=tcg -nodefaults -enable-kvm -display none");
}

#[test]
fn writes_and_errors_of_disks_are_not_ignored_for_an_image() {
    for (text, key) in [
        ("-drive id=d0,if=none,cache=unsafe", "drive.d0.cache"),
        ("-drive id=d0,if=none,cache.no-flush=on", "drive.d0.cache.no-flush"),
        ("-drive id=d0,if=none,werror=ignore", "drive.d0.werror"),
        ("-drive id=d0,if=none,rerror=ignore", "drive.d0.rerror"),
        ("-device ide-hd,id=h0,werror=ignore", "device.h0.werror"),
        ("-device ide-hd,id=h0,rerror=ignore", "device.h0.rerror"),
    ] {
        let refused = refusals(text, &host(&[]));
        assert_eq!(refused.len(), 1, "{refused:?}");
        assert_eq!(refused[0].0, key);
        let value = text.rsplit_once('=').unwrap().1;
        recorded(text).allow(&host(&[&format!("{key}={value}")])).unwrap();
    }
    for text in ["-snapshot", "-nographic"] {
        let key = &text[1..];
        assert_eq!(refusals(text, &host(&[])), [(key.to_owned(), RefusalReason::Host)]);
        let allowed = words(&recorded(text).allow(&host(&[&format!("{key}=")])).unwrap());
        assert!(!allowed.contains(text), "{allowed}");
        let own = HostArguments { arguments: vec![text.into()], ..HostArguments::default() };
        assert!(words(&recorded("-nodefaults").allow(&own).unwrap()).ends_with(text));
    }
}

#[test]
fn options_with_which_the_launcher_would_lose_qemu_are_refused() {
    for (words, wanted) in [
        (
            "-daemonize",
            "-daemonize: the process that the launcher supervises would end at once; leave it out",
        ),
        ("-runas daemon", "-runas: with another user the kernel would not end QEMU"),
        ("-run-with user=daemon", "-run-with user=: with another user"),
        ("-chroot /srv", "-chroot: paths of this command line"),
        ("-run-with chroot=/srv", "-run-with chroot=: paths of this command line"),
    ] {
        let arguments: Vec<_> = words.split(' ').map(OsString::from).collect();
        let own = HostArguments { arguments, ..HostArguments::default() };
        for refused in [recorded("-nodefaults").allow(&own), CommandLine::default().trust(&own)] {
            let text = refused.unwrap_err().to_string();
            assert!(text.starts_with(&format!("QEMU's arguments have {wanted}")), "{text}");
        }
    }
    let set = host(&["runas=daemon"]);
    assert!(matches!(
        recorded("-nodefaults").allow(&set),
        Err(Refused::Unsupervised { option: "-runas", .. })
    ));
    let own = HostArguments {
        arguments: vec!["-run-with".into(), "exit-with-parent=on".into()],
        ..HostArguments::default()
    };
    recorded("-nodefaults").allow(&own).unwrap();
}

#[test]
fn the_message_names_each_refusal() {
    let error =
        recorded("-device vfio-pci,host=01:00.0 -m 1/0").allow(&HostArguments::default()).unwrap_err();
    assert_eq!(
        error.to_string(),
        "command line of the image is refused:\n  device.driver=vfio-pci: an image may not have this type\n  m.size=1/0: expected a \
         size"
    );
    assert_eq!(error.settings(), ["device.driver", "m.size"]);
}

#[test]
fn arguments_of_the_user_follow_as_they_are() {
    let host = HostArguments { arguments: vec!["-vnc".into(), ":1".into()], ..HostArguments::default() };
    assert_eq!(words(&recorded("-nodefaults").allow(&host).unwrap()), "-nodefaults -vnc :1");
    let host = HostArguments { arguments: vec!["-vcn".into()], ..HostArguments::default() };
    assert!(matches!(recorded("-machine q35").allow(&host), Err(Refused::Argument(_))));
}

#[test]
fn an_image_does_not_take_memory_that_its_guest_does_not_use() {
    let allow = |words: &str, settings: &[&str]| {
        let settings = settings.iter().map(|text| text.parse().unwrap()).collect();
        let host = HostArguments { settings, ..HostArguments::default() };
        let allowed = CommandLine::parse(words.split(' ')).unwrap().record().unwrap().allow(&host);
        allowed.map(|allowed| {
            let words = allowed.to_arguments();
            words.iter().map(|word| word.to_str().unwrap()).collect::<Vec<_>>().join(" ")
        })
    };
    let used = "-nodefaults -mem-prealloc -object memory-backend-ram,id=m0,size=1G,prealloc=on,prealloc-threads=4 \
                -machine q35,memory-backend=m0";
    let words = allow(used, &[]).unwrap();
    assert!(!words.contains("prealloc"), "{words}");
    assert!(allow(used, &["object.m0.prealloc=on"]).unwrap().contains("prealloc=on"));
    let unused = "-nodefaults -object memory-backend-memfd,id=m0,size=1T,hugetlb=on";
    let refused = allow(unused, &[]).unwrap_err();
    assert!(
        refused.to_string().ends_with("\n  object.m0: memory that no part of the guest uses"),
        "{refused}"
    );
    assert_eq!(refused.settings(), ["object.m0"]);
    assert!(!allow(unused, &["object.m0="]).unwrap().contains("memfd"));
}

#[test]
fn arguments_of_a_kernel_are_the_guests() {
    let words = ["-nodefaults", "-kernel", "/boot/vmlinuz", "-append", "root=/dev/vda1 console=ttyS0"];
    let recorded = CommandLine::parse(words).unwrap().record().unwrap();
    let refused = recorded.allow(&HostArguments::default()).unwrap_err();
    assert_eq!(refused.settings(), ["kernel"]);
}

/// The verdict about each option of an image, with values of each kind; after it is that about an upgrade,
/// which `towline_control` checks.
#[test]
fn each_option_is_judged_as_listed() {
    let listed = include_str!("../verdicts.txt");
    let mut wrong = Vec::new();
    for line in listed.lines() {
        let [text, verdict, _] = line.split(" => ").collect::<Vec<_>>()[..] else { panic!("{line}") };
        let option = CommandLine::parse(text.split(' ')).unwrap().options()[0].clone();
        let option = serde_json::json!({ "option": option.name.as_str(), "value": option.value_text() });
        let recorded = serde_json::json!({ "version": 1, "options": [option] }).to_string();
        let found = match Recorded::from_json(recorded.as_bytes()).unwrap().allow(&HostArguments::default()) {
            Ok(allowed) => words(&allowed),
            Err(Refused::Image(refusals)) => {
                let refusals: Vec<_> = refusals.iter().map(ToString::to_string).collect();
                refusals.join("; ")
            }
            Err(other) => other.to_string(),
        };
        if found != verdict {
            wrong.push(format!("{text} => {found}"));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    for name in crate::options::names() {
        let is_of = |line: &str| line[1..].split(' ').next() == Some(name);
        assert!(listed.lines().any(is_of), "-{name} is not listed");
    }
}
