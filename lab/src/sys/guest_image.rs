//! The smallest guest, in assembler: see `qemu/boot_sector.rs` for its behaviour and its addresses.
//!
//! The guest is a multiboot image, so QEMU's own loader loads it at 1 MiB and enters it in 32-bit protected
//! mode with paging off. All addresses in it are numbers: the image is data to this program, never linked,
//! never run by it.

use std::arch::global_asm;
use std::ptr::addr_of;

global_asm!(
    r#"
    .pushsection .rodata.towline_lab_guest, "a", @progbits
    .code32
    .balign 4
    .globl towline_lab_guest_start
    .globl towline_lab_guest_end
towline_lab_guest_start:
    .long 0x1badb002                    # multiboot header: magic,
    .long 0x00010000                    # flags: the addresses that follow hold,
    .long -(0x1badb002 + 0x00010000)    # checksum,
    .long 0x00100000                    # where this header is to lie,
    .long 0x00100000                    # where the image begins,
    .long 0                             # its end: all of the file,
    .long 0                             # no zeroed part,
    .long 0x00100000 + (2f - towline_lab_guest_start)
    .long 0                             # 0x100020: pages to fill
    .long 0                             # 0x100024: words to write in each
    .long 0                             # 0x100028: seed
    .long 0                             # 0x10002c: pages to sweep
    .long 0                             # 0x100030: not 0: use popcnt in each step
    .long 0                             # 0x100034: steps between two ticks of the timer, 0: all the time
    .long 0x00100000 + (12f - towline_lab_guest_start)  # 0x100038: the timer's handler
    .short 9 * 8 - 1                    # 0x10003c: the interrupt table: its limit
    .long 0x00111000                    # and address
2:  cli
    mov esp, 0x00120000
    mov edi, 0x200000                   # edi: the page, ebx: its index
    xor ebx, ebx
3:  cmp ebx, dword ptr [0x100020]
    jae 7f
    imul eax, ebx, 0x9e3779b1           # state = index * odd ^ seed, and not 0
    xor eax, dword ptr [0x100028]
    cmp eax, 1
    adc eax, 0
    mov ecx, dword ptr [0x100024]
    mov esi, edi
    test ecx, ecx
    jz 5f
4:  mov edx, eax                        # xorshift32
    shl edx, 13
    xor eax, edx
    mov edx, eax
    shr edx, 17
    xor eax, edx
    mov edx, eax
    shl edx, 5
    xor eax, edx
    mov dword ptr [esi], eax
    add esi, 4
    dec ecx
    jnz 4b
5:  cmp ebx, dword ptr [0x10002c]       # pages of the sweep begin with 0
    jae 6f
    mov byte ptr [edi], 0
6:  add edi, 4096
    inc ebx
    jmp 3b
7:  xor eax, eax                        # edx:eax: the counter
    xor edx, edx
    mov dword ptr [0x110004], 0x444e4152
    mov dword ptr [0x110000], 0x59444145
    mov ebp, dword ptr [0x100034]       # ebp: steps until the next tick
    test ebp, ebp
    jz 8f
    mov ecx, dword ptr [0x100038]       # the firmware has IRQ 0 at vector 8
    mov bx, cs
    shl ebx, 16
    mov bx, cx
    mov dword ptr [0x111040], ebx
    mov cx, 0x8e00                      # a present interrupt gate of 32 bits
    mov dword ptr [0x111044], ecx
    lidt [0x10003c]
    mov al, 0x34                        # the 8254's channel 0: 1,193,182 Hz / 1193
    out 0x43, al
    mov al, 0xa9
    out 0x40, al
    mov al, 0x04
    out 0x40, al
    mov al, 0xfe                        # no other interrupt
    out 0x21, al
    mov al, 0xff
    out 0xa1, al
    xor eax, eax
    sti
8:  mov edi, 0x200000
    mov esi, dword ptr [0x10002c]
9:  cmp dword ptr [0x100034], 0
    je 11f
    dec ebp
    jnz 11f
    hlt
    mov ebp, dword ptr [0x100034]
11: cmp dword ptr [0x100030], 0
    je 10f
    popcnt ebx, eax                     # a processor without it faults, and no handler catches it
10: mov ebx, eax                        # counter += 1, in one store of 8 bytes
    mov ecx, edx
    add ebx, 1
    adc ecx, 0
    cmpxchg8b qword ptr [0x110008]
    mov eax, ebx
    mov edx, ecx
    test esi, esi
    jz 8b
    inc byte ptr [edi]
    add edi, 4096
    dec esi
    jmp 9b
12: push eax                            # the timer's handler
    mov al, 0x20
    out 0x20, al
    pop eax
    iretd
towline_lab_guest_end:
    .code64
    .popsection
    "#
);

unsafe extern "C" {
    static towline_lab_guest_start: u8;
    static towline_lab_guest_end: u8;
}

/// Returns the image as assembled, with zero parameters.
pub(crate) fn guest_image() -> &'static [u8] {
    let (start, end) = (addr_of!(towline_lab_guest_start), addr_of!(towline_lab_guest_end));
    // SAFETY: both symbols bound one read-only section of this program, defined above; nothing writes to it.
    unsafe { std::slice::from_raw_parts(start, end as usize - start as usize) }
}
