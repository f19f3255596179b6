// Settings of the runtime that torch_npu looks up by name and cannot do without; they are accepted and change nothing.
#include <cstdint>

#include "abi.h"
#include "call.h"

#define SIM_ACCEPTS(name)     \
    SIM_API aclError name() { \
        SIM_ENTER();          \
        return acl::kSuccess; \
    }

SIM_ACCEPTS(aclrtSetOpWaitTimeout)
SIM_ACCEPTS(aclrtSetOpExecuteTimeOut)
SIM_ACCEPTS(aclrtSetStreamFailureMode)
SIM_ACCEPTS(aclrtSetStreamOverflowSwitch)
SIM_ACCEPTS(aclrtSetDeviceSatMode)
SIM_ACCEPTS(aclrtCtxSetSysParamOpt)
SIM_ACCEPTS(aclrtSetSysParamOpt)
SIM_ACCEPTS(aclrtSetStreamAttribute)
SIM_ACCEPTS(aclrtSubscribeReport)
SIM_ACCEPTS(aclrtUnSubscribeReport)
SIM_ACCEPTS(aclrtPeekAtLastError)
SIM_ACCEPTS(aclrtGetLastError)

SIM_API aclError aclrtGetSysParamOpt(int /*option*/, int64_t* value) {
    SIM_ENTER();
    *value = 0;
    return acl::kSuccess;
}

SIM_API aclError aclrtCtxGetSysParamOpt(int /*option*/, int64_t* value) {
    SIM_ENTER();
    *value = 0;
    return acl::kSuccess;
}
