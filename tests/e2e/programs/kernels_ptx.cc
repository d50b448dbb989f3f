// The PTX text of kernels.cu, with the NUL that cuModuleLoadData wants.
asm(R"(
    .section .rodata
    .global kernels_ptx
kernels_ptx:
    .incbin ")" PROGRAM_KERNELS_PTX R"("
    .byte 0
    .section .note.GNU-stack,"",%progbits
    .text
)");
