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

fn refusals(text: &str, host: &HostArguments) -> Vec<(String, Reason)> {
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
    let wanted: Vec<_> = wanted.iter().map(|key| ((*key).to_owned(), Reason::Host)).collect();
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
    let wanted = [("drive.d0.format".to_owned(), Reason::Format)];
    assert_eq!(refusals(text, &host(&["drive.d0.file=/vm/a"])), wanted);
    recorded(text).allow(&host(&["drive.d0.file=/vm/a", "drive.d0.format=raw"])).unwrap();
}

#[test]
fn a_secret_that_was_left_out_has_to_be_given() {
    let text = "-drive id=d0,if=none,file=https://me:password@host/a";
    assert_eq!(refusals(text, &host(&[])), [("drive.d0.file".to_owned(), Reason::LeftOut)]);
    let host = host(&["drive.d0.file=/vm/a", "drive.d0.format=raw"]);
    assert!(words(&recorded(text).allow(&host).unwrap()).contains("file=/vm/a"));
    let error = recorded(text).trust(&HostArguments::default()).unwrap_err();
    assert!(error.to_string().contains("drive.d0.file: a secret, which is not in the image"), "{error}");
}

#[test]
fn serial_ports_write_to_files_of_this_host() {
    let text = "-serial file:/etc/passwd -serial none -serial stdio";
    let allowed = words(&recorded(text).allow(&host(&[])).unwrap());
    assert_eq!(
        allowed,
        "-serial file:/run/towline/web/serial0.log -serial none -serial file:/run/towline/web/serial2.log -display none"
    );
    let refused = refusals(text, &HostArguments::default());
    assert_eq!(refused, [("serial.0".to_owned(), Reason::Host), ("serial.2".to_owned(), Reason::Host)]);
}

#[test]
fn the_message_names_each_refusal_and_the_way_out() {
    let error =
        recorded("-device vfio-pci,host=01:00.0 -m 1/0").allow(&HostArguments::default()).unwrap_err();
    assert_eq!(
        error.to_string(),
        "command line of the image is refused: device.driver=vfio-pci: an image may not have this type; m.size=1/0: expected a size. \
         Give each with --set, as --set device.driver=VALUE (an option with an empty value is removed); or, if you trust who made the \
         image as you trust a program, use --trust-command-line"
    );
}

#[test]
fn arguments_of_the_user_follow_as_they_are() {
    let host = HostArguments { arguments: vec!["-vnc".into(), ":1".into()], ..HostArguments::default() };
    assert_eq!(words(&recorded("-machine q35").allow(&host).unwrap()), "-machine q35 -vnc :1");
    let host = HostArguments { arguments: vec!["-vcn".into()], ..HostArguments::default() };
    assert!(matches!(recorded("-machine q35").allow(&host), Err(Refused::Argument(_))));
}
